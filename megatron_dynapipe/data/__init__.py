"""Task files → tokenised dataset; collation of planned micro-batches; the rank's iterator over planned iterations."""
