"""Tables of rows: embeddings, their updates by rows, and tables without a vocabulary.

`row_table` holds the rows of a `DynamicEmbedding`, and `row_initializers` makes new ones.
`row_updates` updates some rows of a variable or of a table; `LazyRows` leaves the state
of all other rows as it is. The parts on parameter servers are
`strategies/parameter_server/server_table.py`, `partitioned.py` and `table_files.py`.
"""
