"""What only a GPU can show: ``python -m tests.gpu`` runs all of it in one command and prints a table.

With pytest, the tests of this folder run the sections that are right or wrong, and skip where there is no GPU.
"""
