//! The items of the section that is being made.

use bytes::Bytes;
use ramet_block::Writer;

use crate::error::Result;
use crate::format::record::{FLAG_CAPABILITY, FLAG_NO_ATIME, FLAG_NO_DUMP, Record};
use crate::format::stream::{NewObject, SentAttributes, SentFlags, StreamItem};
use crate::tools::diff::{Object, Side};
use crate::tools::merge_plan::{attributes_of, path_of};

/// A section takes no more items from this length on.
const SECTION_BYTES: usize = 1 << 20;

/// See the module.
#[derive(Default)]
pub(super) struct Out {
    items: Writer,
    /// Items of the stream.
    count: u64,
    /// The current object of the receiver.
    current: Option<Bytes>,
}

impl Out {
    pub(super) fn is_full(&self) -> bool {
        self.items.len() >= SECTION_BYTES
    }

    /// The items so far; `None` if there are none. A section begins without a current object.
    pub(super) fn take_section(&mut self) -> Option<Vec<u8>> {
        self.current = None;
        let items = std::mem::take(&mut self.items).into_vec();
        (!items.is_empty()).then_some(items)
    }

    pub(super) fn put(&mut self, item: &StreamItem<'_>) {
        item.encode(&mut self.items);
        self.count += 1;
        if matches!(item, StreamItem::Begin(_) | StreamItem::Remove(_)) {
            self.current = None;
        }
    }

    pub(super) fn put_end(&mut self) {
        let count = self.count;
        self.put(&StreamItem::End(count));
    }

    /// Puts an item that makes `object` the current one.
    pub(super) fn put_current(&mut self, object: &Bytes, item: &StreamItem<'_>) {
        self.put(item);
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

    pub(super) fn put_removal(&mut self, object: &Bytes) {
        self.put(&StreamItem::Remove(&path_of(object)));
    }

    pub(super) fn put_link(&mut self, object: &Bytes, first: &Bytes) {
        self.put(&StreamItem::Link {
            path: &path_of(object),
            first: &path_of(first),
        });
        self.current = None;
    }

    /// Makes an object that the receiver has the current one.
    pub(super) fn select(&mut self, object: &Bytes) {
        if self.current.as_ref() != Some(object) {
            let path = path_of(object);
            self.put_current(object, &StreamItem::At(&path));
        }
    }

    /// Puts an item about `object`.
    pub(super) fn put_of(&mut self, object: &Bytes, item: &StreamItem<'_>) {
        self.select(object);
        self.put(item);
    }

    /// Completes a new object: attributes, flags, extended attributes.
    pub(super) fn complete(&mut self, object: &Bytes, new: (&Side, &Object)) -> Result<()> {
        let record = &new.1.record;
        self.put_of(object, &StreamItem::Attributes(attributes(record)));
        if flags(record) != SentFlags::default() {
            self.put_of(object, &StreamItem::Flags(flags(record)));
        }
        for (name, value) in attributes_of(new)? {
            let (name, value) = (&name[..], &value[..]);
            self.put_of(object, &StreamItem::Xattr { name, value });
        }
        Ok(())
    }

    /// Completes an object that was another one, as far as the two differ. A change of the contents
    /// has `touched` it.
    pub(super) fn complete_from(
        &mut self,
        object: &Bytes,
        (old, new): ((&Side, &Object), (&Side, &Object)),
        touched: bool,
    ) -> Result<()> {
        let (before, after) = (&old.1.record, &new.1.record);
        let look = |record: &Record| {
            let SentAttributes {
                perm,
                uid,
                gid,
                mtime,
                ..
            } = attributes(record);
            (perm, uid, gid, mtime)
        };
        let sets_attributes = touched || look(before) != look(after);
        if sets_attributes {
            self.put_of(object, &StreamItem::Attributes(attributes(after)));
        }
        if flags(before) != flags(after) {
            self.put_of(object, &StreamItem::Flags(flags(after)));
        }
        let (before, wanted) = (attributes_of(old)?, attributes_of(new)?);
        for name in before.keys().filter(|name| !wanted.contains_key(*name)) {
            self.put_of(object, &StreamItem::NoXattr(name));
        }
        // A change of contents or owner takes the capabilities.
        let lost = sets_attributes && after.has(FLAG_CAPABILITY);
        for (name, value) in &wanted {
            let is_lost = lost && name[..] == b"security.capability"[..];
            if is_lost || before.get(name) != Some(value) {
                self.put_of(object, &StreamItem::Xattr { name, value });
            }
        }
        Ok(())
    }
}

fn attributes(record: &Record) -> SentAttributes {
    SentAttributes {
        perm: record.mode & 0o7777,
        uid: record.uid,
        gid: record.gid,
        atime: record.atime,
        mtime: record.mtime,
    }
}

fn flags(record: &Record) -> SentFlags {
    SentFlags {
        no_atime: record.has(FLAG_NO_ATIME),
        no_dump: record.has(FLAG_NO_DUMP),
    }
}
