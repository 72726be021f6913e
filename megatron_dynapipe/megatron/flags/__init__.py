"""The command line: DynaPipe's flags, the published fork's, the checks of Megatron's, and the inputs of planning."""
