"""Every use of JAX's internals and of the MLIR that JAX lowers to.

JAX does not guarantee these interfaces, so look here first when a new release breaks something.
A line "JAX 0.10.2, 0.11.2: ..." above a definition names the internals that it uses and the
releases of JAX that it was checked against.
"""
