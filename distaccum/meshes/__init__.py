"""Ranks that compute on the same samples: stages of a pipeline, and tensor, context and expert meshes."""
