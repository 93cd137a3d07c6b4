//! Encodings that runs, skeletons and blocks share.

use bytes::Bytes;
use ramet_block::encoding::{DecodeError, Reader, Writer};

use crate::key::translation::Translation;

pub(crate) fn put_bytes(w: &mut Writer, bytes: &[u8]) {
    w.bytes(bytes);
}

pub(crate) fn take_bytes<'a>(r: &mut Reader<'a>) -> std::result::Result<&'a [u8], DecodeError> {
    r.bytes(usize::MAX)
}

pub(crate) fn put_hi(w: &mut Writer, hi: Option<&Bytes>) {
    match hi {
        None => w.u8(0),
        Some(hi) => {
            w.u8(1);
            put_bytes(w, hi);
        }
    }
}

pub(crate) fn take_hi(r: &mut Reader<'_>) -> std::result::Result<Option<Bytes>, DecodeError> {
    match r.u8()? {
        0 => Ok(None),
        1 => Ok(Some(Bytes::copy_from_slice(take_bytes(r)?))),
        _ => Err(MALFORMED),
    }
}

pub(crate) fn put_translation(w: &mut Writer, translation: &Translation) {
    w.varint(translation.strip as u64);
    put_bytes(w, &translation.prepend);
}

pub(crate) fn take_translation(
    r: &mut Reader<'_>,
) -> std::result::Result<Translation, DecodeError> {
    let strip = usize::try_from(r.varint()?).map_err(|_| MALFORMED)?;
    Ok(Translation {
        strip,
        prepend: Bytes::copy_from_slice(take_bytes(r)?),
    })
}

/// A height label, written as a varint.
pub(crate) fn take_height(r: &mut Reader<'_>) -> std::result::Result<u32, DecodeError> {
    u32::try_from(r.varint()?).map_err(|_| MALFORMED)
}

pub(crate) fn put_key(w: &mut Writer, key: &[u8]) {
    put_bytes(w, key);
}

/// A structure contradicts an invariant of the format.
pub(crate) const MALFORMED: DecodeError = DecodeError::Value {
    field: "structure",
    found: 0,
};
