"""Redraws the dashboards from a run, where there is no Grafana: `python -m monitoring.pictures`.

`board` reads a dashboard's JSON, `source` asks a Prometheus that has imported the run, `units` and
`board` say values and names as Grafana does, `curves`, `tables` and `page` draw, `browser` makes
pictures of the pages. They show what a dashboard asks for and what is answered; fonts and spacing
are not Grafana's.
"""
