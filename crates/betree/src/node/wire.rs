//! Encodings that runs, skeletons and blocks share.

use bytes::Bytes;
use ramet_block::encoding::{DecodeError, Reader, Writer};

use crate::key::translation::{NUMBER_BYTES_MAX, Rest, Translation};

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

/// The kinds of [`Rest`] as they are encoded, and one more than the greatest.
const REST_KEPT: u64 = 0;
const REST_NUMBER: u64 = 1;
const REST_NOTHING: u64 = 2;
const REST_KINDS: u64 = 3;

pub(crate) fn put_translation(w: &mut Writer, translation: &Translation) {
    let kind = match translation.rest {
        Rest::Kept => REST_KEPT,
        Rest::Number { .. } => REST_NUMBER,
        Rest::Nothing => REST_NOTHING,
    };
    w.varint(REST_KINDS * translation.strip as u64 + kind);
    put_bytes(w, &translation.prepend);
    if let Rest::Number { from, to, add } = translation.rest {
        w.u8(from);
        w.u8(to);
        w.varint(add);
    }
}

pub(crate) fn take_translation(
    r: &mut Reader<'_>,
) -> std::result::Result<Translation, DecodeError> {
    let first = r.varint()?;
    let strip = usize::try_from(first / REST_KINDS).map_err(|_| MALFORMED)?;
    let prepend = Bytes::copy_from_slice(take_bytes(r)?);
    let rest = match first % REST_KINDS {
        REST_KEPT => Rest::Kept,
        REST_NUMBER => {
            let (from, to, add) = (r.u8()?, r.u8()?, r.varint()?);
            let is_sound = usize::from(from.max(to)) <= NUMBER_BYTES_MAX
                && (usize::from(to) == NUMBER_BYTES_MAX || add >> (8 * to) == 0);
            if !is_sound {
                return Err(MALFORMED);
            }
            Rest::Number { from, to, add }
        }
        REST_NOTHING if strip == 0 && prepend.is_empty() => Rest::Nothing,
        _ => return Err(MALFORMED),
    };
    Ok(Translation {
        strip,
        prepend,
        rest,
    })
}

/// A height label, written as a varint.
pub(crate) fn take_height(r: &mut Reader<'_>) -> std::result::Result<u32, DecodeError> {
    u32::try_from(r.varint()?).map_err(|_| MALFORMED)
}

/// Most bytes of the key before that a key is told with. So a decoder allocates no more than 255
/// bytes of keys for two that it reads.
const SHARED_MAX: usize = 255;

/// Writes the keys and the numbers of nodes of a skeleton: each is told by its difference to the one
/// before.
#[derive(Default)]
pub(crate) struct NearWriter {
    key: Bytes,
    node: u64,
}

impl NearWriter {
    pub(crate) fn put_key(&mut self, w: &mut Writer, key: &Bytes) {
        let shared = shared_bytes(&self.key, key);
        w.u8(u8::try_from(shared).expect("it is at most 255"));
        put_bytes(w, &key[shared..]);
        self.key = key.clone();
    }

    pub(crate) fn put_hi(&mut self, w: &mut Writer, hi: Option<&Bytes>) {
        w.u8(u8::from(hi.is_some()));
        if let Some(hi) = hi {
            self.put_key(w, hi);
        }
    }

    pub(crate) fn put_node(&mut self, w: &mut Writer, node: u64) {
        w.signed(node.wrapping_sub(self.node).cast_signed());
        self.node = node;
    }
}

/// Reads the keys and numbers of a [`NearWriter`].
#[derive(Default)]
pub(crate) struct NearReader {
    key: Bytes,
    node: u64,
}

impl NearReader {
    pub(crate) fn take_key(&mut self, r: &mut Reader<'_>) -> Result<Bytes, DecodeError> {
        let shared = usize::from(r.u8()?);
        let rest = take_bytes(r)?;
        let first = self.key.get(..shared).ok_or(MALFORMED)?;
        let key = Bytes::from([first, rest].concat());
        // Each skeleton has one encoding.
        if shared != shared_bytes(&self.key, &key) {
            return Err(MALFORMED);
        }
        self.key = key.clone();
        Ok(key)
    }

    pub(crate) fn take_hi(&mut self, r: &mut Reader<'_>) -> Result<Option<Bytes>, DecodeError> {
        match r.u8()? {
            0 => Ok(None),
            1 => self.take_key(r).map(Some),
            _ => Err(MALFORMED),
        }
    }

    pub(crate) fn take_node(&mut self, r: &mut Reader<'_>) -> Result<u64, DecodeError> {
        self.node = self.node.wrapping_add(r.signed()?.cast_unsigned());
        Ok(self.node)
    }
}

/// Length of the longest common prefix of up to [`SHARED_MAX`] bytes.
fn shared_bytes(a: &[u8], b: &[u8]) -> usize {
    let both = a.iter().zip(b).take(SHARED_MAX);
    both.take_while(|(a, b)| a == b).count()
}

/// A structure contradicts an invariant of the format.
pub(crate) const MALFORMED: DecodeError = DecodeError::Value {
    field: "structure",
    found: 0,
};
