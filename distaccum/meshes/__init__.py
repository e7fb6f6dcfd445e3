"""Ranks that compute on the same samples: stages of a pipeline, and the parts of tensor, context and expert meshes."""
