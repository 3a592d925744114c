"""Cases: what goes wrong when people finetune, reworded from public bug reports of many tools, each a claim about what
the command line does. The ids (A01 to A50) stand in the docstrings; `grep -rn A17 tests` finds one."""
