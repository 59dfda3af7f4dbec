"""Plans as data: regions, certificates, reports. No JAX, no solver."""
