"""Print the facts of a model as JSON.

`python -m paceline.train.workloads TASK OPTIONS_JSON DATA SAMPLES`
"""

from __future__ import annotations

import json
import sys

from paceline.base.errors import PacelineError
from paceline.base.host.memory import permanent_objects


def main() -> None:
    task, options, data, samples = sys.argv[1:]
    with permanent_objects():
        from paceline.train.workloads.facts import derive_facts  # noqa: PLC0415  (imports torch)

        try:
            facts = derive_facts(task, json.loads(options), data, int(samples))
        except PacelineError as error:
            sys.exit(str(error))
    print(facts.model_dump_json())


if __name__ == "__main__":
    main()
