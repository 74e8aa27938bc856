"""`mtem methods`."""

from __future__ import annotations

from rich.table import Table

from mtem.cli.console import out


def methods() -> None:
    """List what can be given to --method.

    With the paper of each method, and whether it needs labeled target texts.

    **Example**

    mtem methods
    """
    from mtem.methods import registry

    table = Table("method", "what it does", "paper", "target labels", box=None, header_style="bold")
    for name in registry.METHODS:
        method_cls = registry.get(name)
        table.add_row(name, method_cls.summary, method_cls.paper, "needed" if method_cls.needs_target_labels else "optional")
    out.print(table)
