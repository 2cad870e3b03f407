"""Two pipelines behind one interface: native threads without the GIL, and portable Python."""
