"""crc32c, the checksum of every sample: Castagnoli's polynomial, as in Zarr's codec of that name and in iSCSI.

From the AWS common runtime, which folds with AVX-512 where a processor has it: 49 GB/s where google-crc32c and the
package crc32c reach 28 (25 KB in cache, one Zen 5 core), and the checksum is a third of a checked read. It releases the
GIL above 5 KB: two threads check 25 KB samples on two cores.
"""

from awscrt.checksums import crc32c

__all__ = ["crc32c"]
