"""Which connection helps this model: short trainings side by side (`compare_connections`, `flowscope try`)."""
