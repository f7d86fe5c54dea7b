"""The scheduler: the REST front end and the planner; it talks Thrift to the inference services."""
