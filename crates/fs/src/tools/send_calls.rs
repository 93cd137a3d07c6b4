//! The control call that makes a stream ([`crate::control::SEND`]): requests, which are JSON, and
//! pages of sections.

use std::fmt;

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{Error, Result};
use crate::format::stream::StreamId;
use crate::tools::control::STAT_BYTES;

/// Size of the head of a page.
const PAGE_HEAD_BYTES: usize = 24;
/// Most bytes of a section in one page.
const PAGE_BYTES_MAX: usize = STAT_BYTES - PAGE_HEAD_BYTES;
/// The page ends a section, and the section ends the stream.
const ENDS_SECTION: u8 = 1;
const ENDS_STREAM: u8 = 2;

/// A request for a stream. Paths are names from the root of the volume, joined by `/`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum SendRequest {
    /// Send this tree, too. The first one begins a stream.
    Add {
        /// Token of the root of the volume, the answer to [`SOURCE`](crate::control::SOURCE); 0
        /// where neither tree is of a snapshot.
        root: u64,
        /// A number that the caller chose, and that all requests for the stream have.
        session: u64,
        /// Whether the stream begins with it.
        begins: bool,
        /// The name that the tree gets.
        #[serde(with = "name_in_json")]
        name: Vec<u8>,
        /// Snapshot and path of the tree; none for the directory that the call is made on, as it is
        /// when the first page is asked for.
        #[serde(with = "place_in_json")]
        at: Option<(String, Vec<u8>)>,
        /// Snapshot and path of the tree that the receiver has.
        #[serde(with = "place_in_json")]
        base: Option<(String, Vec<u8>)>,
    },
    /// Tell the next page.
    Next {
        /// The number of the stream.
        session: u64,
    },
    /// Keep the stream, and tell nothing.
    Keep {
        /// The number of the stream.
        session: u64,
    },
}

/// Bytes as a string of JSON, if they are one, and as numbers otherwise: the longest paths of the
/// system have room in a request.
struct InJson(Vec<u8>);

impl Serialize for InJson {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        match std::str::from_utf8(&self.0) {
            Ok(text) => to.serialize_str(text),
            Err(_) => to.collect_seq(&self.0),
        }
    }
}

impl<'de> Deserialize<'de> for InJson {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        struct Bytes;
        impl<'de> Visitor<'de> for Bytes {
            type Value = Vec<u8>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, or the numbers of bytes")
            }

            fn visit_str<E>(self, text: &str) -> std::result::Result<Vec<u8>, E> {
                Ok(text.as_bytes().to_vec())
            }

            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut numbers: A,
            ) -> std::result::Result<Vec<u8>, A::Error> {
                let mut bytes = Vec::new();
                while let Some(byte) = numbers.next_element()? {
                    bytes.push(byte);
                }
                Ok(bytes)
            }
        }
        from.deserialize_any(Bytes).map(Self)
    }
}

mod name_in_json {
    use super::{Deserialize, Deserializer, InJson, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(name: &[u8], to: S) -> Result<S::Ok, S::Error> {
        InJson(name.to_vec()).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        InJson::deserialize(from).map(|name| name.0)
    }
}

mod place_in_json {
    use super::{Deserialize, Deserializer, InJson, Serialize, Serializer};

    type Place = Option<(String, Vec<u8>)>;

    pub(super) fn serialize<S: Serializer>(place: &Place, to: S) -> Result<S::Ok, S::Error> {
        let place = place.as_ref();
        let place = place.map(|(snapshot, path)| (snapshot, InJson(path.clone())));
        place.serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Place, D::Error> {
        let place = Option::<(String, InJson)>::deserialize(from)?;
        Ok(place.map(|(snapshot, path)| (snapshot, path.0)))
    }
}

impl SendRequest {
    /// The number of the stream, and whether it begins.
    #[must_use]
    pub fn session(&self) -> (u64, bool) {
        match self {
            Self::Add {
                session, begins, ..
            } => (*session, *begins),
            Self::Next { session } | Self::Keep { session } => (*session, false),
        }
    }
}

/// A part of a section in an answer to [`SendRequest::Next`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendPage {
    /// The stream.
    pub stream: StreamId,
    /// Bytes of items.
    pub items: Vec<u8>,
    /// The section ends with them.
    pub ends_section: bool,
    /// The stream ends with the section.
    pub ends_stream: bool,
}

impl SendPage {
    /// The bytes of the answer.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let len = u32::try_from(self.items.len()).expect("a page is short");
        let ends = |flag, is_set| if is_set { flag } else { 0 };
        let mut out = Vec::with_capacity(STAT_BYTES);
        out.extend_from_slice(&self.stream.0);
        out.extend_from_slice(&len.to_le_bytes());
        out.push(ends(ENDS_SECTION, self.ends_section) | ends(ENDS_STREAM, self.ends_stream));
        out.resize(PAGE_HEAD_BYTES, 0);
        out.extend_from_slice(&self.items);
        out
    }

    /// Decodes the bytes of [`SendPage::encode`], and zeros behind them.
    ///
    /// # Errors
    /// `Invalid` for bytes that are no page.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let invalid = Error::Invalid("a page of a stream");
        let (head, rest) = bytes
            .split_first_chunk::<PAGE_HEAD_BYTES>()
            .ok_or(invalid.clone())?;
        let len = u32::from_le_bytes(head[16..20].try_into().expect("four bytes"));
        let items = rest.get(..len as usize).ok_or(invalid)?;
        Ok(Self {
            stream: StreamId(head[..16].try_into().expect("sixteen bytes")),
            items: items.to_vec(),
            ends_section: head[20] & ENDS_SECTION != 0,
            ends_stream: head[20] & ENDS_STREAM != 0,
        })
    }
}

/// A section that is being told.
#[derive(Default)]
pub(crate) struct Told {
    items: Vec<u8>,
    at: usize,
}

impl Told {
    pub(crate) fn of(items: Vec<u8>) -> Self {
        Self { items, at: 0 }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.at == self.items.len()
    }

    pub(crate) fn next_part(&mut self) -> Vec<u8> {
        let end = self.items.len().min(self.at + PAGE_BYTES_MAX);
        let part = self.items[self.at..end].to_vec();
        self.at = end;
        part
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_told_in_pages() {
        let items: Vec<u8> = (0..3 * PAGE_BYTES_MAX).map(|n| (n / 251) as u8).collect();
        let (mut told, mut back) = (Told::of(items.clone()), Vec::new());
        while !told.is_done() {
            let page = SendPage {
                stream: StreamId([7; 16]),
                items: told.next_part(),
                ends_section: told.is_done(),
                ends_stream: false,
            };
            let mut bytes = page.encode();
            assert!(bytes.len() <= STAT_BYTES);
            bytes.resize(STAT_BYTES, 0);
            assert_eq!(SendPage::decode(&bytes).unwrap(), page);
            back.extend(page.items);
        }
        assert_eq!(back, items);
        let cut = SendPage::decode(&[0; PAGE_HEAD_BYTES - 1]);
        assert!(matches!(cut, Err(Error::Invalid(_))));
        let mut long = [0; PAGE_HEAD_BYTES];
        long[16] = 1;
        assert!(matches!(SendPage::decode(&long), Err(Error::Invalid(_))));
    }
}
