"""One-shot heads: linear classifiers on cached features, each of which is a single accounted release.

Training by steps spends its budget on many noisy gradients. At a small epsilon one noisy sum can do better: it needs no
learning rate, no epochs and no clipping bound to tune, and it takes seconds.

- ``records`` gives every record the form in which it contributes: centred, projected, and of unit length.
- ``projection`` has public projections to fewer numbers.
- ``class_means`` releases the sum of the features of every class, and scores by the cosine.
- ``least_squares`` releases the Gram matrix and the moments of the features, and solves a ridge regression.
- ``linear_head`` is what both make: the weights of an ordinary dense layer.
"""

from spectral_dp.heads.class_means import private_class_means as private_class_means
from spectral_dp.heads.errors import HeadError as HeadError
from spectral_dp.heads.least_squares import private_least_squares as private_least_squares
from spectral_dp.heads.linear_head import LinearHead as LinearHead
from spectral_dp.heads.projection import random_projection as random_projection
