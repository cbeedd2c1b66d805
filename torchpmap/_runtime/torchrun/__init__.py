"""One process per device, started by torchrun, srun or mpirun."""
