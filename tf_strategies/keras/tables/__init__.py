"""Tables of rows: embeddings, their updates by rows, and tables without a vocabulary.

`row_table` holds the rows of a `DynamicEmbedding`.
`row_updates` reads and updates some rows of a variable or a table; `LazyRows` leaves the state
of all other rows as it is. The parts on parameter servers are
`partitioned.py` and `table_files.py` in `strategies/parameter_server/`.
"""
