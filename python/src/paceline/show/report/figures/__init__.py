"""The report's figures, as Plotly figures in JSON; the only package that knows Plotly."""
