"""Everything that is taken from JAX's internals or read off the MLIR that JAX lowers to.

JAX promises nothing about what stands here, so this is the one folder to look at when a new
release breaks something. A line "JAX 0.10.2, 0.11.2: ..." above a definition names what it
takes from JAX, and the releases of JAX in which that was there and did what is said here.
"""
