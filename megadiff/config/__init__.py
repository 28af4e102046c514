"""The config: schema, loading, and the rules between keys."""
