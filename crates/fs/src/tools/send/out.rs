//! The items of the section that is being made.
//!
//! A section ends at an item: a task that goes on behind a full one begins the next, and no section is
//! longer than receivers take.

use std::collections::VecDeque;

use bytes::Bytes;
use ramet_block::Writer;

use crate::error::{Error, Result};
use crate::format::stream::{CopyFrom, NewObject, StreamItem};
use crate::tools::merge_plan::path_of;

/// A section takes no more items from this length on. The rest of the longest section has room for two
/// items with three paths.
const SECTION_BYTES: usize = 1 << 20;

/// See the module.
#[derive(Default)]
pub(super) struct Out {
    /// Sections that are full.
    full: VecDeque<Vec<u8>>,
    items: Writer,
    /// Items of the stream.
    count: u64,
    /// The current object of the receiver.
    current: Option<Bytes>,
    /// An item that no receiver takes.
    refused: Option<Error>,
}

impl Out {
    /// Whether a section can be taken.
    pub(super) fn is_full(&self) -> bool {
        !self.full.is_empty() || self.items.len() >= SECTION_BYTES
    }

    pub(super) fn is_empty(&self) -> bool {
        self.full.is_empty() && self.items.is_empty()
    }

    /// The next section; `None` if there are no items. A section begins without a current object.
    ///
    /// # Errors
    /// `Corrupt` for an item that no receiver takes.
    pub(super) fn take_section(&mut self) -> Result<Option<Vec<u8>>> {
        if let Some(error) = self.refused.take() {
            return Err(error);
        }
        if self.full.is_empty() && !self.items.is_empty() {
            self.end_section();
        }
        Ok(self.full.pop_front())
    }

    fn end_section(&mut self) {
        self.current = None;
        let items = std::mem::take(&mut self.items).into_vec();
        self.full.push_back(items);
    }

    /// Begins another section for the next items, if this one is full.
    fn make_room(&mut self) {
        if self.items.len() >= SECTION_BYTES {
            self.end_section();
        }
    }

    fn append(&mut self, item: &StreamItem<'_>) {
        if self.refused.is_none()
            && let Err(error) = item.check()
        {
            let current = self.current.as_ref().map(|object| path_of(object));
            let path = item.path().or(current.as_deref()).unwrap_or_default();
            self.refused = Some(Error::Corrupt {
                what: "object that is sent",
                detail: format!("{}: {error}", path.escape_ascii()),
            });
        }
        item.encode(&mut self.items);
        self.count += 1;
    }

    /// Puts an item that leaves no current object.
    pub(super) fn put(&mut self, item: &StreamItem<'_>) {
        self.make_room();
        self.append(item);
        self.current = None;
    }

    pub(super) fn put_end(&mut self) {
        let count = self.count;
        self.put(&StreamItem::End(count));
    }

    /// Puts an item that makes `object` the current one.
    pub(super) fn put_current(&mut self, object: &Bytes, item: &StreamItem<'_>) {
        self.make_room();
        self.append(item);
        self.current = Some(object.clone());
    }

    pub(super) fn put_new(&mut self, object: &Bytes, new: NewObject<'_>) {
        let path = path_of(object);
        let item = StreamItem::Make {
            path: &path,
            object: new,
        };
        self.put_current(object, &item);
    }

    pub(super) fn put_copy(&mut self, object: &Bytes, from: CopyFrom, from_object: &Bytes) {
        let (path, from_path) = (path_of(object), path_of(from_object));
        let item = StreamItem::Copy {
            path: &path,
            from,
            from_path: &from_path,
        };
        self.put_current(object, &item);
    }

    pub(super) fn put_removal(&mut self, object: &Bytes) {
        self.put(&StreamItem::Remove(&path_of(object)));
    }

    pub(super) fn put_link(&mut self, object: &Bytes, first: &Bytes) {
        self.put(&StreamItem::Link {
            path: &path_of(object),
            first: &path_of(first),
        });
    }

    /// Puts an item about `object`, which the receiver has.
    pub(super) fn put_of(&mut self, object: &Bytes, item: &StreamItem<'_>) {
        self.make_room();
        if self.current.as_ref() != Some(object) {
            self.append(&StreamItem::At(&path_of(object)));
            self.current = Some(object.clone());
        }
        self.append(item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::keys;
    use crate::format::stream::{SECTION_BYTES_MAX, STREAM_PATH_BYTES_MAX, StreamItems};

    #[test]
    fn sections_of_the_longest_items_are_not_too_long_and_tell_their_object() {
        let name = [b'n'; 255];
        let object =
            (0..STREAM_PATH_BYTES_MAX / 257).fold(Bytes::new(), |dir, _| keys::child(&dir, &name));
        let other = keys::child(&object.slice(..object.len() - 257), b"other");
        let mut out = Out::default();
        let value = &[1; 65_536][..];
        for _ in 0..5 {
            out.put_link(&other, &object);
            for _ in 0..20 {
                let name = b"user.a";
                out.put_of(&object, &StreamItem::Xattr { name, value });
            }
        }
        let mut links = 0;
        while let Some(section) = out.take_section().unwrap() {
            assert!(section.len() <= SECTION_BYTES_MAX, "{}", section.len());
            let (mut items, mut has_current) = (StreamItems::new(&section), false);
            while let Some(item) = items.next_item().unwrap() {
                has_current = match item {
                    StreamItem::Xattr { .. } => {
                        assert!(has_current);
                        true
                    }
                    StreamItem::Link { .. } => {
                        links += 1;
                        false
                    }
                    _ => true,
                };
            }
        }
        assert!(links == 5 && out.is_empty());
    }

    #[test]
    fn item_that_no_receiver_takes_is_refused_with_its_path() {
        let mut out = Out::default();
        let object = keys::child(b"", b"odd");
        let long = [0; 65_537];
        for (name, value) in [(&b"user.a"[..], &long[..]), (b"", b""), (&long[..300], b"")] {
            out.put_of(&object, &StreamItem::Xattr { name, value });
            let refused = out.take_section().unwrap_err();
            assert!(refused.to_string().contains("odd: "), "{refused}");
        }
        out.put_new(&object, NewObject::Symlink(&[b'x'; 5000]));
        assert!(out.take_section().is_err());
    }
}
