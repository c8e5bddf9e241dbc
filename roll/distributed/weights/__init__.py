"""How weight buckets travel from rank 0 of a trainer to generators: routes by placement, a sender, a receiver."""
