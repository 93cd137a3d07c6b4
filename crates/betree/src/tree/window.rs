//! Windows: a part of the key space, shown as if it were the whole, for reading.
//!
//! A window has a *base*, some bytes. It shows the key `x base y` as `x y`, where `x` is one byte,
//! and no other key:
//!
//! ```text
//!  keys of the tree    a b    a d    a BASE b    a BASE c    b d    b BASE e
//!  keys of the window                a b         a c                b e
//! ```
//!
//! So a clone that a batch made of the ranges `a` and `b` to `a BASE` and `b BASE` is read by a
//! program that knows nothing of the base. A scan of a window stays within one first byte.

use std::borrow::Cow;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::key::range::successor_of_prefix;
use crate::read::diff::Span;

/// The base of a window; empty for the whole key space.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Window(pub(super) Bytes);

impl Window {
    /// Whether it is the whole key space.
    pub(crate) fn is_whole(&self) -> bool {
        self.0.is_empty()
    }

    /// Refuses changes through a window.
    pub(crate) fn check_whole(&self) -> Result<()> {
        match self.is_whole() {
            true => Ok(()),
            false => Err(Error::ReadOnly),
        }
    }

    /// The key of the tree that the window shows as `key`.
    pub(crate) fn key<'a>(&self, key: &'a [u8]) -> Cow<'a, [u8]> {
        match key.split_first() {
            Some((first, rest)) if !self.is_whole() => {
                Cow::Owned([std::slice::from_ref(first), &self.0, rest].concat())
            }
            _ => Cow::Borrowed(key),
        }
    }

    /// The end in the tree of a range that begins with `lo` and that the window shows to end at
    /// `hi`. It lies within the first byte of `lo`.
    pub(crate) fn end(&self, lo: &[u8], hi: Option<&[u8]>) -> Option<Bytes> {
        if self.is_whole() {
            return hi.map(Bytes::copy_from_slice);
        }
        match hi {
            Some(hi) if hi.len() > 1 && hi.first() == lo.first() => {
                Some(self.key(hi).into_owned().into())
            }
            _ => successor_of_prefix(&self.key(&lo[..lo.len().min(1)])),
        }
    }

    /// The span in the tree of a span of the window, which strips one byte or more: the keys show
    /// the same bytes.
    pub(crate) fn span(&self, span: &Span) -> Span {
        if self.is_whole() {
            return span.clone();
        }
        let range = span.keys();
        let lo = self.key(&range.lo).into_owned();
        let hi = self.end(&range.lo, range.hi.as_deref());
        span.moved(lo.into(), hi, self.0.len())
    }

    /// Writes a key of the tree to `out`, as the window shows it.
    pub(crate) fn show(&self, key: &[u8], out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(&key[..1]);
        out.extend_from_slice(&key[1 + self.0.len()..]);
    }

    /// A key of the tree, as the window shows it.
    pub(crate) fn shown(&self, key: Bytes) -> Bytes {
        if self.is_whole() {
            return key;
        }
        let mut out = Vec::with_capacity(key.len());
        self.show(&key, &mut out);
        out.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_a_window_keep_their_order_and_come_back() {
        let window = Window(Bytes::from_static(b"\x01base"));
        let keys: [&[u8]; 5] = [b"a", b"a\0", b"ab", b"b", b"b\xff"];
        for pair in keys.windows(2) {
            assert!(window.key(pair[0]) < window.key(pair[1]));
        }
        for key in keys {
            let inside = Bytes::from(window.key(key).into_owned());
            assert_eq!(window.shown(inside)[..], *key);
        }
        let end = |lo: &[u8], hi| window.end(lo, hi).map(|end| end.to_vec());
        assert_eq!(end(b"ab", Some(b"ac")), Some(b"a\x01basec".to_vec()));
        assert_eq!(end(b"a", Some(b"b")), Some(b"a\x01basf".to_vec()));
        assert_eq!(end(b"ab", None), Some(b"a\x01basf".to_vec()));
        let whole = Window::default();
        assert_eq!(whole.key(b"ab")[..], *b"ab");
        assert_eq!(whole.end(b"a", None), None);
    }

    #[test]
    fn a_span_of_a_window_shows_the_same_keys() {
        let window = Window(Bytes::from_static(b"\x01base"));
        let span = window.span(&Span::prefix(&b"ab"[..]));
        assert_eq!(span, Span::prefix(&b"a\x01baseb"[..]));
        let one = window.span(&Span::prefix(&b"a"[..]));
        assert_eq!(one, Span::prefix(&b"a\x01base"[..]));
    }
}
