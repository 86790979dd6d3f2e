"""The commands: `paceline …`. A verb has a module of its own, which is loaded when the verb runs.

1. `app` finds the verb and its module;
2. the verb reads its options and calls `paceline.api`, as a user's Python does;
3. data goes to standard output, logs and progress to standard error;
4. an error becomes a message and an exit code (`paceline.base.errors`);
5. a signal ends the verb in order (`signals`).

Read first: `app.main`.
"""

from paceline.cli.app import main

__all__ = ["main"]
