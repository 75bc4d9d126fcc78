"""The gguf package's reader with arrays read in one go: a vocabulary costs it seconds otherwise, half of a start."""

from __future__ import annotations

import struct
from typing import Any

from gguf import GGUFReader, GGUFValueType


class FastReader(GGUFReader):  # type: ignore[misc]
    """GGUFReader whose fields read the same. Should the package drop the hook below, it is only slower."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type == GGUFValueType.ARRAY and self.byte_order == "I":
            kind = GGUFValueType(int(self._get(orig_offs, "uint32")[0]))
            if kind in self.gguf_scalar_to_np or kind == GGUFValueType.STRING:
                return self._array(orig_offs, kind)
        found: tuple[int, list[Any], list[int], list[Any]] = super()._get_field_parts(orig_offs, raw_type)
        return found

    def _array(self, start: int, kind: Any) -> tuple[int, list[Any], list[int], list[Any]]:
        header = [self._get(start, "uint32"), self._get(start + 4, "uint64")]
        count, offset = int(header[1][0]), start + 12
        types = [GGUFValueType.ARRAY, kind] if count else [GGUFValueType.ARRAY]
        if kind != GGUFValueType.STRING:
            values = self._get(offset, self.gguf_scalar_to_np[kind], count)
            if len(values) != count:
                raise ValueError("the file ends inside an array")
            return 12 + int(values.nbytes), [*header, values], [2], types
        data, length = memoryview(self.data), struct.Struct("<Q").unpack_from
        strings: list[Any] = []
        for _ in range(count):
            (size,) = length(data, offset)
            offset += 8 + size
            strings.append(data[offset - size:offset])
        if offset > len(data):
            raise ValueError("the file ends inside an array of strings")
        return offset - start, [*header, *strings], list(range(2, 2 + count)), types
