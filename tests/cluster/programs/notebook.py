"""A notebook with a SparkContext of its own: notebook.py SCRIPT WORDS…

It runs the job script twice in the context, as `%run` does, then jobs of its own, and prints what
it finds as JSON.
"""

import json
import os
import runpy
import sys

from pyspark import SparkContext

script, *words = sys.argv[1:]
context = SparkContext("local[2]", "notebook")
before = dict(context.getConf().getAll()), dict(context.environment)
codes = []
for repeat in ("0", "1"):
    sys.argv = [script, *words, "--repeat", repeat]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        codes.append(ended.code)
cores = context.parallelize(range(2), 2).map(lambda _: len(os.sched_getaffinity(0))).collect()
found = {
    "codes": codes,
    "sum": context.parallelize(range(5)).sum(),
    "kept": before == (dict(context.getConf().getAll()), dict(context.environment)),
    "cores": cores,
    "all_cores": len(os.sched_getaffinity(0)),
}
print(json.dumps(found))
