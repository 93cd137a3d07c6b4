//! The completion of an object: attributes, flags and extended attributes, behind its contents.
//!
//! Nothing limits the extended attributes of an object, so a completion may take many sections. Of an
//! object that was another one the attributes that differ are sent.

use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::{Diff, successor_of_prefix};

use crate::error::Result;
use crate::format::keys;
use crate::format::record::{
    CAPABILITY, FLAG_CAPABILITY, FLAG_NO_ATIME, FLAG_NO_DUMP, FLAG_XATTRS, Kind, Record,
};
use crate::format::stream::{SentAttributes, SentFlags, StreamItem};
use crate::tools::diff::{Object, Side};
use crate::tools::send::out::Out;

/// An object of a tree.
type Of = (Arc<Side>, Object);

/// An object that is being completed.
pub(super) struct Completion {
    object: Bytes,
    new: Of,
    /// The object that it was.
    old: Option<Of>,
    /// The contents changed.
    touched: bool,
    left: Left,
}

/// The part of a completion that is to come.
enum Left {
    All,
    /// The extended attributes behind the one with this key.
    Behind(Bytes),
    /// The extended attributes that this comparison has not come to.
    Differing(Box<Diff>),
}

impl Completion {
    /// That of a new object.
    pub(super) fn of_new(object: Bytes, new: Of) -> Box<Self> {
        Box::new(Self {
            object,
            new,
            old: None,
            touched: true,
            left: Left::All,
        })
    }

    /// That of an object that was another one. A change of the contents has `touched` it.
    pub(super) fn of_changed(object: Bytes, (old, new): (Of, Of), touched: bool) -> Box<Self> {
        Box::new(Self {
            object,
            new,
            old: Some(old),
            touched,
            left: Left::All,
        })
    }

    /// Sends attributes until the section is full. Answers the rest, if there is one.
    pub(super) fn go_on(mut self: Box<Self>, out: &mut Out) -> Result<Option<Box<Self>>> {
        if matches!(self.left, Left::All) {
            self.put_record(out)?;
            self.left = self.xattrs()?;
        }
        let is_done = match &mut self.left {
            Left::All => true,
            Left::Behind(last) => put_xattrs(&self.object, (&self.new, last), out)?,
            Left::Differing(diff) => put_differing(&self.object, diff, out)?,
        };
        Ok((!is_done).then_some(self))
    }

    /// Sends the attributes that the record tells, as far as they differ.
    fn put_record(&self, out: &mut Out) -> Result<()> {
        let (side, file) = &self.new;
        let record = &file.record;
        let before = self.old.as_ref().map(|(_, old)| &old.record);
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
        let sets_attributes =
            self.touched || before.is_none_or(|before| look(before) != look(record));
        if sets_attributes {
            let item = StreamItem::Attributes(attributes(record));
            out.put_of(&self.object, &item);
        }
        // No other kind of object takes chattr(1), though it has the flags of its directory.
        let takes_flags = matches!(record.kind(), Kind::Regular | Kind::Directory);
        if takes_flags && flags(record) != before.map_or(SentFlags::default(), flags) {
            out.put_of(&self.object, &StreamItem::Flags(flags(record)));
        }
        if self.old.is_some() && sets_attributes && record.has(FLAG_CAPABILITY) {
            let value = side.snapshot.get(&keys::xattr(&file.path, CAPABILITY))?;
            if let Some(value) = value {
                let (name, value) = (CAPABILITY, &value[..]);
                out.put_of(&self.object, &StreamItem::Xattr { name, value });
            }
        }
        Ok(())
    }

    /// The extended attributes to be sent.
    fn xattrs(&self) -> Result<Left> {
        let (side, file) = &self.new;
        let prefix = |file: &Object| keys::xattr(&file.path, b"");
        Ok(match &self.old {
            None if file.record.has(FLAG_XATTRS) => Left::Behind(prefix(file)),
            Some((before, old)) if has_xattrs(old) || has_xattrs(file) => {
                let diff = before.diff(prefix(old), side, prefix(file))?;
                Left::Differing(Box::new(diff))
            }
            _ => Left::All,
        })
    }
}

fn has_xattrs(object: &Object) -> bool {
    object.record.has(FLAG_XATTRS)
}

/// Sends the extended attributes behind the key `last`, and answers whether those were all.
fn put_xattrs(
    object: &Bytes,
    ((side, file), last): (&Of, &mut Bytes),
    out: &mut Out,
) -> Result<bool> {
    let prefix = keys::xattr(&file.path, b"");
    let end = successor_of_prefix(&prefix);
    let lo = Bytes::from([&last[..], &[0]].concat());
    let lo = if *last == prefix { &prefix } else { &lo };
    for item in side.snapshot.scan(lo, end.as_deref()) {
        if out.is_full() {
            return Ok(false);
        }
        let (key, value) = item?;
        let (name, value) = (&key[prefix.len()..], &value[..]);
        out.put_of(object, &StreamItem::Xattr { name, value });
        *last = key;
    }
    Ok(true)
}

/// Sends the extended attributes that differ, and answers whether those were all.
fn put_differing(object: &Bytes, diff: &mut Diff, out: &mut Out) -> Result<bool> {
    while !out.is_full() {
        let Some(item) = diff.next().transpose()? else {
            return Ok(true);
        };
        let name = &item.key[..];
        match &item.after {
            Some(_) if item.before == item.after => {}
            Some(value) => out.put_of(object, &StreamItem::Xattr { name, value }),
            None => out.put_of(object, &StreamItem::NoXattr(name)),
        }
    }
    Ok(false)
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
