"""The comparison for people: a table for the terminal, figures, one self-contained HTML page.

Takes only what the analysis computed.
"""
