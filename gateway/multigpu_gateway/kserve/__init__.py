"""KServe's Open Inference Protocol (version 2) with Triton's extensions.

The functions of `inference`, `models` and `repository` take and return the messages of open_inference.proto, and raise
HttpError. `service` serves them over gRPC, `endpoints` over HTTP.
"""
