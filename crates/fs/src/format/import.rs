//! Frames of an import: objects with their attributes and contents, as a program hands them over.
//!
//! A frame is eight bytes, the length of its body and a mark, and then items to its end. An object
//! comes first, and then its extended attributes and its contents. All integers are little-endian,
//! lengths and offsets are varints ([`ramet_block::encoding`]):
//!
//! ```text
//! 1 directory  path attributes
//! 2 file       path attributes size
//! 3 symlink    path attributes target
//! 4 special    path attributes device      a pipe, a socket or a device; the mode tells which
//! 5 link       path first                  another name of the object at the path `first`
//! 6 xattr      name value                  of the object before it
//! 7 data       offset bytes                of the file before it, in ascending order
//!
//! attributes   flags (1), mode, uid, gid (4 each), atime, mtime (8 + 4 each)
//! ```
//!
//! Paths are relative to the top of the tree, with a `/` between names; the top itself is the empty
//! path. A directory comes before its entries. The offset of data is a multiple of 4 KiB, and so is
//! its length, unless it ends with the file. The parts of a file without data are holes. The flag
//! of the attributes says that the object has further names, which may follow.

use ramet_block::{DecodeError, Reader, Writer};

use crate::error::{Error, Result};
use crate::format::record::{NANOS_PER_SEC, TARGET_BYTES_MAX, Time};

/// Longest frame, with its head: a request of the kernel carries as much.
pub const FRAME_BYTES_MAX: usize = 1 << 20;
/// Size of the head of a frame.
pub const FRAME_HEAD_BYTES: usize = 8;
/// Longest path of an object, in bytes.
pub const IMPORT_PATH_BYTES_MAX: usize = 128 << 10;

const MARK: u32 = u32::from_le_bytes(*b"rIm1");
const DIRECTORY: u8 = 1;
const FILE: u8 = 2;
const SYMLINK: u8 = 3;
const SPECIAL: u8 = 4;
const LINK: u8 = 5;
const XATTR: u8 = 6;
const DATA: u8 = 7;
const HAS_NAMES: u8 = 1;
/// Bytes of an item beside path, target, name, value and data, at most.
pub const ITEM_BYTES_MAX: usize = 96;

/// Attributes of an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImportAttr {
    /// Type and permissions, as in `st_mode`.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Time of the last access.
    pub atime: Time,
    /// Time of the last change of the contents.
    pub mtime: Time,
    /// The object has further names, which may follow as [`ImportItem::Link`].
    pub has_names: bool,
}

/// The part of an object that depends on its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImportBody<'a> {
    /// A directory.
    Directory,
    /// A file of so many bytes.
    File(u64),
    /// A symbolic link with this target.
    Symlink(&'a [u8]),
    /// A pipe, a socket, or a device with this number.
    Special(u32),
}

/// An item of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImportItem<'a> {
    /// An object.
    Object {
        /// Path from the top of the tree.
        path: &'a [u8],
        /// Attributes; the mode has the type that the body tells.
        attr: ImportAttr,
        /// The rest.
        body: ImportBody<'a>,
    },
    /// Another name of an object that was imported before.
    Link {
        /// The path of the new name.
        path: &'a [u8],
        /// A path of the object.
        first: &'a [u8],
    },
    /// An extended attribute of the object before it.
    Xattr {
        /// Name, with its namespace.
        name: &'a [u8],
        /// Value.
        value: &'a [u8],
    },
    /// Contents of the file before it.
    Data {
        /// Offset in the file.
        offset: u64,
        /// The bytes.
        bytes: &'a [u8],
    },
}

/// A frame that is being filled.
#[derive(Debug)]
pub struct FrameWriter(Writer);

impl Default for FrameWriter {
    fn default() -> Self {
        let mut writer = Writer::with_capacity(FRAME_BYTES_MAX);
        writer.u32(0);
        writer.u32(MARK);
        Self(writer)
    }
}

impl FrameWriter {
    /// An empty frame.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes so far, with the head.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is no item yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == FRAME_HEAD_BYTES
    }

    /// Bytes of data that the next item may have.
    #[must_use]
    pub fn room(&self) -> usize {
        FRAME_BYTES_MAX.saturating_sub(self.len() + ITEM_BYTES_MAX)
    }

    /// Adds an item. The caller has seen to it that there is room.
    pub fn put(&mut self, item: &ImportItem<'_>) {
        let w = &mut self.0;
        match *item {
            ImportItem::Object { path, attr, body } => {
                w.u8(match body {
                    ImportBody::Directory => DIRECTORY,
                    ImportBody::File(_) => FILE,
                    ImportBody::Symlink(_) => SYMLINK,
                    ImportBody::Special(_) => SPECIAL,
                });
                w.bytes(path);
                put_attr(w, &attr);
                match body {
                    ImportBody::Directory => {}
                    ImportBody::File(size_bytes) => w.varint(size_bytes),
                    ImportBody::Symlink(target) => w.bytes(target),
                    ImportBody::Special(device) => w.u32(device),
                }
            }
            ImportItem::Link { path, first } => {
                w.u8(LINK);
                w.bytes(path);
                w.bytes(first);
            }
            ImportItem::Xattr { name, value } => {
                w.u8(XATTR);
                w.bytes(name);
                w.bytes(value);
            }
            ImportItem::Data { offset, bytes } => {
                w.u8(DATA);
                w.varint(offset);
                w.bytes(bytes);
            }
        }
    }

    /// Adds the items of another frame, if there is room for them.
    pub fn append(&mut self, other: &[u8]) -> bool {
        let items = other.get(FRAME_HEAD_BYTES..).unwrap_or_default();
        let fits = self.len() + items.len() <= FRAME_BYTES_MAX;
        if fits {
            self.0.raw(items);
        }
        fits
    }

    /// The bytes of the frame.
    #[must_use]
    pub fn finish(self) -> Vec<u8> {
        let mut bytes = self.0.into_vec();
        let body = u32::try_from(bytes.len() - FRAME_HEAD_BYTES).expect("a frame is short");
        bytes[..4].copy_from_slice(&body.to_le_bytes());
        bytes
    }
}

fn put_attr(w: &mut Writer, attr: &ImportAttr) {
    w.u8(if attr.has_names { HAS_NAMES } else { 0 });
    for field in [attr.mode, attr.uid, attr.gid] {
        w.u32(field);
    }
    for time in [attr.atime, attr.mtime] {
        w.u64(time.secs.cast_unsigned());
        w.u32(time.nanos);
    }
}

/// Length of the frame that begins with these bytes, with its head.
///
/// # Errors
/// `Invalid` when the bytes begin no frame.
pub fn frame_bytes(head: &[u8; FRAME_HEAD_BYTES]) -> Result<usize> {
    let u32_at = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes"));
    let bytes = (u32_at(0) as usize).saturating_add(FRAME_HEAD_BYTES);
    if u32_at(4) != MARK || bytes > FRAME_BYTES_MAX {
        return Err(Error::Invalid("head of a frame"));
    }
    Ok(bytes)
}

/// The items of a frame.
#[derive(Debug)]
pub struct Items<'a>(Reader<'a>);

impl<'a> Items<'a> {
    /// The items of a whole frame.
    #[must_use]
    pub fn of_frame(frame: &'a [u8]) -> Self {
        Self(Reader::new(
            frame.get(FRAME_HEAD_BYTES..).unwrap_or_default(),
        ))
    }

    /// The next item; `None` at the end.
    ///
    /// # Errors
    /// `Invalid` when the bytes are no item.
    pub fn next_item(&mut self) -> Result<Option<ImportItem<'a>>> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let item = take_item(&mut self.0);
        item.map(Some)
            .map_err(|_| Error::Invalid("item of an import"))
    }
}

fn take_item<'a>(r: &mut Reader<'a>) -> std::result::Result<ImportItem<'a>, DecodeError> {
    let tag = r.u8()?;
    Ok(match tag {
        DIRECTORY | FILE | SYMLINK | SPECIAL => ImportItem::Object {
            path: r.bytes(IMPORT_PATH_BYTES_MAX)?,
            attr: take_attr(r)?,
            body: match tag {
                DIRECTORY => ImportBody::Directory,
                FILE => ImportBody::File(r.varint()?),
                SYMLINK => ImportBody::Symlink(r.bytes(TARGET_BYTES_MAX)?),
                _ => ImportBody::Special(r.u32()?),
            },
        },
        LINK => ImportItem::Link {
            path: r.bytes(IMPORT_PATH_BYTES_MAX)?,
            first: r.bytes(IMPORT_PATH_BYTES_MAX)?,
        },
        XATTR => ImportItem::Xattr {
            name: r.bytes(FRAME_BYTES_MAX)?,
            value: r.bytes(FRAME_BYTES_MAX)?,
        },
        DATA => ImportItem::Data {
            offset: r.varint()?,
            bytes: r.bytes(FRAME_BYTES_MAX)?,
        },
        _ => {
            return Err(DecodeError::Value {
                field: "tag of an item",
                found: tag.into(),
            });
        }
    })
}

fn take_attr(r: &mut Reader<'_>) -> std::result::Result<ImportAttr, DecodeError> {
    let unknown = |field, found: u32| DecodeError::Value {
        field,
        found: found.into(),
    };
    let flags = r.u8()?;
    if flags & !HAS_NAMES != 0 {
        return Err(unknown("flags of an object", flags.into()));
    }
    let (mode, uid, gid) = (r.u32()?, r.u32()?, r.u32()?);
    let mut time = || {
        let (secs, nanos) = (r.u64()?.cast_signed(), r.u32()?);
        if nanos >= NANOS_PER_SEC {
            return Err(unknown("nanoseconds", nanos));
        }
        Ok(Time { secs, nanos })
    };
    Ok(ImportAttr {
        mode,
        uid,
        gid,
        atime: time()?,
        mtime: time()?,
        has_names: flags & HAS_NAMES != 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Vec<ImportItem<'static>> {
        let attr = ImportAttr {
            mode: 0o100_644,
            uid: 1,
            gid: 2,
            atime: Time { secs: -1, nanos: 7 },
            mtime: Time { secs: 9, nanos: 8 },
            has_names: true,
        };
        let object = |path, body| ImportItem::Object { path, attr, body };
        vec![
            object(b"", ImportBody::Directory),
            object(b"a", ImportBody::File(300)),
            ImportItem::Xattr {
                name: b"user.a",
                value: b"v",
            },
            ImportItem::Data {
                offset: 0,
                bytes: b"abc",
            },
            object(b"b", ImportBody::Symlink(b"t")),
            object(b"c", ImportBody::Special(5)),
            ImportItem::Link {
                path: b"d",
                first: b"a",
            },
        ]
    }

    fn frame() -> Vec<u8> {
        let mut frame = FrameWriter::new();
        assert!(frame.is_empty());
        sample().iter().for_each(|item| frame.put(item));
        frame.finish()
    }

    #[test]
    fn golden_bytes() {
        let mut want = b"\xf5\0\0\0rIm1".to_vec();
        let attr = [
            &[1, 0xa4, 0x81, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0][..],
            &[0xff; 8],
            &[7, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0],
        ];
        let attr = attr.concat();
        want.extend([&[1, 0][..], &attr, b"\x02\x01a", &attr, b"\xac\x02"].concat());
        want.extend(b"\x06\x06user.a\x01v\x07\0\x03abc");
        want.extend([b"\x03\x01b", &attr[..], b"\x01t", b"\x04\x01c", &attr].concat());
        want.extend(b"\x05\0\0\0\x05\x01d\x01a");
        want[0] = u8::try_from(want.len() - FRAME_HEAD_BYTES).unwrap();
        assert_eq!(frame(), want);
    }

    #[test]
    fn items_come_back_and_cut_frames_are_refused() {
        let frame = frame();
        assert_eq!(
            frame_bytes(frame.first_chunk().unwrap()).unwrap(),
            frame.len()
        );
        let mut items = Items::of_frame(&frame);
        for item in sample() {
            assert_eq!(items.next_item().unwrap(), Some(item));
        }
        assert_eq!(items.next_item().unwrap(), None);
        for len in FRAME_HEAD_BYTES..frame.len() {
            let mut items = Items::of_frame(&frame[..len]);
            while let Ok(Some(_)) = items.next_item() {}
        }
        let mut wrong = *frame.first_chunk().unwrap();
        wrong[3] = 1;
        assert!(frame_bytes(&wrong).is_err());
        wrong[3..5].copy_from_slice(&[0, 0]);
        assert!(frame_bytes(&wrong).is_err());
    }
}
