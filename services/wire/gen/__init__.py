__all__ = ['ttypes', 'constants', 'Inference', 'Adaptation']
