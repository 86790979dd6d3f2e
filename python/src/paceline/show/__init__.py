"""Tables, page, figures, and files for other tools.

1. `export.run_data` reads a run directory and has it analysed;
2. `report.section` describes a table once, for the terminal and the page;
3. `report.columns` lists the columns of the comparison;
4. `report.document` renders the page with `report.figures`; `export` writes files;
5. `monitor` shows a run that is still going on.

Read first: `report.document.page_sections`.
"""
