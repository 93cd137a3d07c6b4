//! Streams of `ramet send`: a head, and sections of items that make trees. `docs/send.md` tells every
//! byte.
//!
//! A stream is logical: names, attributes and contents, and no number of an inode or a node. It is
//! never trusted. Each length has a limit, each name is checked, and a section is decoded only if its
//! checksum is right.

use ramet_betree::KEY_BYTES_MAX;
use ramet_block::codec::{compress, decompress};
use ramet_block::{Codec, DecodeError, Reader, Writer, ZstdLevel, checksum};

use crate::error::{Error, Result};
use crate::format::blocks::FILE_BYTES_MAX;
use crate::format::name::{NAME_BYTES_MAX, check_name};
use crate::format::record::{Kind, NANOS_PER_SEC, S_IFMT, TARGET_BYTES_MAX, Time};

/// Size of the head of a stream.
pub const STREAM_HEAD_BYTES: usize = 40;
/// Size of the head of a section.
pub const SECTION_HEAD_BYTES: usize = 32;
/// Most bytes of the items of a section.
pub const SECTION_BYTES_MAX: usize = 4 << 20;
/// Longest path of an object, in bytes: keys of the tree are no longer.
pub const STREAM_PATH_BYTES_MAX: usize = 1 << 20;
const _: () = assert!(STREAM_PATH_BYTES_MAX >= KEY_BYTES_MAX);
// A section has room for a copy, and for as much as it has when it is full.
const _: () = assert!(SECTION_BYTES_MAX > 3 * STREAM_PATH_BYTES_MAX);
/// Most bytes of one item of data.
pub(crate) const DATA_BYTES_MAX: usize = 128 << 10;

const MAGIC: &[u8; 8] = b"RAMETSND";
const VERSION: u32 = 1;
const MARK: u32 = u32::from_le_bytes(*b"rSec");
const LAST: u8 = 1;
/// The level at which sections are compressed.
const LEVEL: u8 = 3;
/// Longest value of an extended attribute, in bytes.
const VALUE_BYTES_MAX: usize = 65536;

const ROOT: u8 = 1;
const DIRECTORY: u8 = 2;
const FILE: u8 = 3;
const SYMLINK: u8 = 4;
const SPECIAL: u8 = 5;
const LINK: u8 = 6;
const COPY: u8 = 7;
const REMOVE: u8 = 8;
const AT: u8 = 9;
const DATA: u8 = 10;
const HOLE: u8 = 11;
const SIZE: u8 = 12;
const ATTRIBUTES: u8 = 13;
const FLAGS: u8 = 14;
const XATTR: u8 = 15;
const NO_XATTR: u8 = 16;
const END: u8 = 17;
const BEGIN: u8 = 18;

const FLAG_NO_ATIME: u8 = 1;
const FLAG_NO_DUMP: u8 = 2;

/// The identity of a stream, or of a tree at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub [u8; 16]);

impl StreamId {
    /// The identity with this hash, of a tree or stream that its sender can make again (version 8 of
    /// RFC 9562).
    pub(crate) fn of_hash(hash: [u8; 16]) -> Self {
        Self(hash).with_version(8)
    }

    /// The identity of a tree or stream that its sender can make only once (version 4).
    pub(crate) fn made_once(self) -> Self {
        self.with_version(4)
    }

    /// Whether the sender can make the same tree or stream again, as all of it is of snapshots.
    #[must_use]
    pub fn comes_again(self) -> bool {
        self.0[6] >> 4 == 8
    }

    fn with_version(mut self, version: u8) -> Self {
        self.0[6] = self.0[6] & 0x0f | version << 4;
        self.0[8] = self.0[8] & 0x3f | 0x80;
        self
    }
}

impl std::fmt::Display for StreamId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The head of a stream.
#[must_use]
pub fn encode_stream_head(id: StreamId) -> [u8; STREAM_HEAD_BYTES] {
    let mut w = Writer::with_capacity(STREAM_HEAD_BYTES);
    w.raw(MAGIC);
    w.u32(VERSION);
    w.u32(0);
    w.raw(&id.0);
    w.u64(checksum(w.as_slice()));
    let bytes = w.into_vec();
    bytes.try_into().expect("the fields have this size")
}

/// The identity of the stream with this head.
///
/// # Errors
/// `Invalid` for bytes that begin no stream, or one of another version.
pub fn decode_stream_head(head: &[u8; STREAM_HEAD_BYTES]) -> Result<StreamId> {
    let (fields, sum) = head.split_at(STREAM_HEAD_BYTES - 8);
    if fields[..8] != MAGIC[..] {
        return Err(Error::Invalid("these bytes are no stream of ramet send"));
    }
    if fields[8..12] != VERSION.to_le_bytes() {
        return Err(Error::Invalid("the stream has another version"));
    }
    if sum != checksum(fields).to_le_bytes() || fields[12..16] != [0; 4] {
        return Err(Error::Invalid("the head of the stream is damaged"));
    }
    Ok(StreamId(fields[16..].try_into().expect("sixteen bytes")))
}

/// The sections of one stream, in order.
#[derive(Clone, Copy, Debug)]
pub struct Sections {
    stream: StreamId,
    /// Number of the last one, and its checksum.
    done: (u64, u64),
}

/// The head of a section, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SectionHead {
    codec: Codec,
    /// The stream ends with it.
    pub is_last: bool,
    /// Number of the section, from 1 on.
    pub number: u64,
    /// Bytes that follow the head.
    pub stored_bytes: usize,
    raw_bytes: usize,
    sum: u64,
}

impl SectionHead {
    /// Decodes the head of a section.
    ///
    /// # Errors
    /// `Invalid` for bytes that are no head, and for a section that is too long.
    pub fn decode(head: &[u8; SECTION_HEAD_BYTES]) -> Result<Self> {
        let damaged = Error::Invalid("the head of a section is damaged");
        let mut r = Reader::new(head);
        let mut fields = || -> Decoded<_> {
            let (mark, tag, flags, reserved) = (r.u32()?, r.u8()?, r.u8()?, r.u16()?);
            let (number, stored, raw) = (r.u64()?, r.u32()?, r.u32()?);
            Ok((mark, tag, flags, reserved, number, stored, raw, r.u64()?))
        };
        let (mark, tag, flags, reserved, number, stored, raw, sum) =
            fields().map_err(|_| damaged.clone())?;
        let codec = Codec::from_tag(tag).ok();
        let codec = codec.filter(|codec| *codec != Codec::Lz4);
        let is_sound = mark == MARK && flags & !LAST == 0 && reserved == 0;
        let (true, Some(codec)) = (is_sound, codec) else {
            return Err(damaged);
        };
        let (stored_bytes, raw_bytes) = (stored as usize, raw as usize);
        if stored_bytes > SECTION_BYTES_MAX || raw_bytes > SECTION_BYTES_MAX {
            return Err(Error::Invalid("a section is too long"));
        }
        Ok(Self {
            codec,
            is_last: flags & LAST != 0,
            number,
            stored_bytes,
            raw_bytes,
            sum,
        })
    }
}

impl Sections {
    /// The sections of a stream.
    #[must_use]
    pub fn of(stream: StreamId) -> Self {
        Self::behind(stream, (0, 0))
    }

    /// The sections behind the one with this number and checksum.
    #[must_use]
    pub fn behind(stream: StreamId, done: (u64, u64)) -> Self {
        Self { stream, done }
    }

    /// Number and checksum of the last section.
    #[must_use]
    pub fn done(&self) -> (u64, u64) {
        self.done
    }

    /// The bytes of the next section, with its head.
    ///
    /// # Panics
    /// The items are longer than [`SECTION_BYTES_MAX`]: no receiver would take them.
    #[must_use]
    pub fn encode(&mut self, items: &[u8], is_last: bool) -> Vec<u8> {
        assert!(items.len() <= SECTION_BYTES_MAX, "a section has a limit");
        let zstd = Codec::Zstd(ZstdLevel::new(LEVEL).expect("a level that there is"));
        let packed = compress(zstd, items);
        let codec = if packed.is_some() { zstd } else { Codec::Raw };
        let stored = packed.as_deref().unwrap_or(items);
        let len = |bytes: &[u8]| u32::try_from(bytes.len()).expect("a section is short");
        let number = self.done.0 + 1;
        let mut w = Writer::with_capacity(SECTION_HEAD_BYTES + stored.len());
        w.u32(MARK);
        w.u8(codec.tag());
        w.u8(if is_last { LAST } else { 0 });
        w.u16(0);
        w.u64(number);
        w.u32(len(stored));
        w.u32(len(items));
        let sum = self.sum_of(w.as_slice(), stored);
        w.u64(sum);
        w.raw(stored);
        self.done = (number, sum);
        w.into_vec()
    }

    /// The items of the next section, of which `head` is the decoded head.
    ///
    /// # Errors
    /// `Invalid` for a section that does not follow the last one, and for bytes that are not those
    /// that were written.
    pub fn open(
        &mut self,
        (bytes, head): (&[u8; SECTION_HEAD_BYTES], &SectionHead),
        stored: &[u8],
    ) -> Result<Vec<u8>> {
        if head.number != self.done.0 + 1 {
            return Err(Error::Invalid("a section is missing, or out of order"));
        }
        if self.sum_of(&bytes[..SECTION_HEAD_BYTES - 8], stored) != head.sum {
            return Err(Error::Invalid("a section is damaged, or of another stream"));
        }
        let items = decompress(head.codec, stored, head.raw_bytes);
        let items = items.map_err(|_| Error::Invalid("a section cannot be decompressed"))?;
        self.done = (head.number, head.sum);
        Ok(items)
    }

    /// The checksum of the next section: of the stream's identity, the checksum of the section
    /// before, the head and the bytes behind it. So it is right for all sections up to this one.
    fn sum_of(&self, head: &[u8], stored: &[u8]) -> u64 {
        let mut w = Writer::with_capacity(64);
        w.raw(&self.stream.0);
        w.u64(self.done.1);
        w.raw(head);
        w.u64(checksum(stored));
        checksum(w.as_slice())
    }
}

/// The kind of a new object, with the part that only this kind has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewObject<'a> {
    /// A directory.
    Directory,
    /// A file of so many bytes, all of them a hole.
    File(u64),
    /// A symbolic link with this target.
    Symlink(&'a [u8]),
    /// A pipe, a socket or a device, with the number of a device.
    Special(Kind, u32),
}

/// The tree that a copy is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyFrom {
    /// The root with this number in the stream, as far as it was sent.
    Root(u32),
    /// The base of the root that is being sent, as it was.
    Base,
}

/// Attributes of an object. Times are those of the last access and the last change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SentAttributes {
    /// Permission bits with setuid, setgid and sticky.
    pub perm: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Time of the last access.
    pub atime: Time,
    /// Time of the last change of the contents.
    pub mtime: Time,
}

/// The flags of chattr(1) that copies keep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SentFlags {
    /// Reading does not change the time of access (`A`).
    pub no_atime: bool,
    /// Programs that make backups leave it out (`d`).
    pub no_dump: bool,
}

/// An item of a stream. Paths lead from the top of the root that is being sent, with a `/` between
/// names; the empty path is the top.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamItem<'a> {
    /// There is a root. All roots come first.
    Root {
        /// The name that it gets.
        name: &'a [u8],
        /// The tree at this moment.
        id: StreamId,
        /// The tree and moment that it is made of; none for an empty place.
        base: Option<StreamId>,
    },
    /// The root with this number begins: a copy of its base, if it has one. The next root follows it.
    Begin(u32),
    /// An object comes into being, and is the current one.
    Make {
        /// Its path.
        path: &'a [u8],
        /// Its kind.
        object: NewObject<'a>,
    },
    /// Another name of an object of this root.
    Link {
        /// The new name.
        path: &'a [u8],
        /// A name that it has.
        first: &'a [u8],
    },
    /// A copy of an object with everything below it, which is the current one then.
    Copy {
        /// Its path.
        path: &'a [u8],
        /// The tree of the object that it is a copy of.
        from: CopyFrom,
        /// The path of that object.
        from_path: &'a [u8],
    },
    /// A name goes, with everything below it.
    Remove(&'a [u8]),
    /// An object that is there is the current one.
    At(&'a [u8]),
    /// Contents of the current file.
    Data {
        /// Offset in the file.
        offset: u64,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// A part of the current file is a hole.
    Hole {
        /// Offset in the file.
        offset: u64,
        /// Length.
        len: u64,
    },
    /// The current file has so many bytes.
    Size(u64),
    /// Attributes of the current object.
    Attributes(SentAttributes),
    /// Flags of the current object.
    Flags(SentFlags),
    /// An extended attribute of the current object.
    Xattr {
        /// Name, with its namespace.
        name: &'a [u8],
        /// Value.
        value: &'a [u8],
    },
    /// The current object has no extended attribute of this name.
    NoXattr(&'a [u8]),
    /// The stream is whole, and has so many items before this one.
    End(u64),
}

impl StreamItem<'_> {
    /// The path of the object that the item names.
    pub(crate) fn path(&self) -> Option<&[u8]> {
        match *self {
            Self::Make { path, .. }
            | Self::Link { path, .. }
            | Self::Copy { path, .. }
            | Self::Remove(path)
            | Self::At(path) => Some(path),
            _ => None,
        }
    }

    /// Refuses an item that no receiver takes.
    ///
    /// # Errors
    /// Those of [`StreamItems::next_item`].
    pub(crate) fn check(&self) -> Result<()> {
        let (limit, longest) = match *self {
            Self::Data { bytes, .. } => (DATA_BYTES_MAX, bytes.len()),
            Self::Xattr { name, value } if name.len() <= NAME_BYTES_MAX => {
                (VALUE_BYTES_MAX, value.len())
            }
            Self::Xattr { name, .. } | Self::NoXattr(name) => (NAME_BYTES_MAX, name.len()),
            Self::Make {
                object: NewObject::Symlink(target),
                ..
            } if target.len() > TARGET_BYTES_MAX => (TARGET_BYTES_MAX, target.len()),
            Self::Link { path, first } => (STREAM_PATH_BYTES_MAX, path.len().max(first.len())),
            Self::Copy {
                path, from_path, ..
            } => (STREAM_PATH_BYTES_MAX, path.len().max(from_path.len())),
            _ => (STREAM_PATH_BYTES_MAX, self.path().map_or(0, <[u8]>::len)),
        };
        if longest > limit {
            return Err(Error::NameTooLong);
        }
        check_item(self)
    }

    /// Appends the bytes of the item.
    pub fn encode(&self, w: &mut Writer) {
        match *self {
            Self::Root { name, id, base } => {
                w.u8(ROOT);
                w.bytes(name);
                w.raw(&id.0);
                w.u8(u8::from(base.is_some()));
                w.raw(&base.unwrap_or_default().0);
            }
            Self::Begin(number) => {
                w.u8(BEGIN);
                w.u32(number);
            }
            Self::Make { path, object } => encode_new(w, path, object),
            Self::Link { path, first } => put(w, LINK, &[path, first]),
            Self::Copy {
                path,
                from,
                from_path,
            } => {
                put(w, COPY, &[path]);
                w.varint(match from {
                    CopyFrom::Base => 0,
                    CopyFrom::Root(number) => u64::from(number) + 1,
                });
                w.bytes(from_path);
            }
            Self::Remove(path) => put(w, REMOVE, &[path]),
            Self::At(path) => put(w, AT, &[path]),
            Self::Data { offset, bytes } => {
                w.u8(DATA);
                w.varint(offset);
                w.bytes(bytes);
            }
            Self::Hole { offset, len } => {
                w.u8(HOLE);
                w.varint(offset);
                w.varint(len);
            }
            Self::Size(bytes) => {
                w.u8(SIZE);
                w.varint(bytes);
            }
            Self::Attributes(attributes) => encode_attributes(w, &attributes),
            Self::Flags(flags) => {
                let no_atime = if flags.no_atime { FLAG_NO_ATIME } else { 0 };
                let no_dump = if flags.no_dump { FLAG_NO_DUMP } else { 0 };
                w.u8(FLAGS);
                w.u8(no_atime | no_dump);
            }
            Self::Xattr { name, value } => put(w, XATTR, &[name, value]),
            Self::NoXattr(name) => put(w, NO_XATTR, &[name]),
            Self::End(items) => {
                w.u8(END);
                w.varint(items);
            }
        }
    }
}

fn put(w: &mut Writer, tag: u8, parts: &[&[u8]]) {
    w.u8(tag);
    parts.iter().for_each(|part| w.bytes(part));
}

fn encode_new(w: &mut Writer, path: &[u8], object: NewObject<'_>) {
    match object {
        NewObject::Directory => put(w, DIRECTORY, &[path]),
        NewObject::File(bytes) => {
            put(w, FILE, &[path]);
            w.varint(bytes);
        }
        NewObject::Symlink(target) => put(w, SYMLINK, &[path, target]),
        NewObject::Special(kind, device) => {
            put(w, SPECIAL, &[path]);
            w.u32(kind.mode_bits());
            w.u32(device);
        }
    }
}

fn encode_attributes(w: &mut Writer, attributes: &SentAttributes) {
    w.u8(ATTRIBUTES);
    for field in [attributes.perm, attributes.uid, attributes.gid] {
        w.u32(field);
    }
    for time in [attributes.atime, attributes.mtime] {
        w.u64(time.secs.cast_unsigned());
        w.u32(time.nanos);
    }
}

/// The items of a section.
#[derive(Debug)]
pub struct StreamItems<'a>(Reader<'a>);

impl<'a> StreamItems<'a> {
    /// The items in these bytes.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(Reader::new(bytes))
    }

    /// The next item; `None` at the end. Names and paths are those that entries can have.
    ///
    /// # Errors
    /// `Invalid` for bytes that are no item, `NameTooLong`.
    pub fn next_item(&mut self) -> Result<Option<StreamItem<'a>>> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let item = take_item(&mut self.0).map_err(|_| Error::Invalid("item of a stream"))?;
        check_item(&item)?;
        Ok(Some(item))
    }
}

type Decoded<T> = std::result::Result<T, DecodeError>;

fn unknown(field: &'static str, found: u64) -> DecodeError {
    DecodeError::Value { field, found }
}

fn take_id(r: &mut Reader<'_>) -> Decoded<StreamId> {
    Ok(StreamId(r.take(16)?.try_into().expect("sixteen bytes")))
}

fn take_item<'a>(r: &mut Reader<'a>) -> Decoded<StreamItem<'a>> {
    let tag = r.u8()?;
    let path = |r: &mut Reader<'a>| r.bytes(STREAM_PATH_BYTES_MAX);
    Ok(match tag {
        ROOT => take_root(r)?,
        DIRECTORY | FILE | SYMLINK | SPECIAL => StreamItem::Make {
            path: path(r)?,
            object: take_new(r, tag)?,
        },
        LINK => StreamItem::Link {
            path: path(r)?,
            first: path(r)?,
        },
        COPY => StreamItem::Copy {
            path: path(r)?,
            from: match r.varint()? {
                0 => CopyFrom::Base,
                number => CopyFrom::Root(
                    u32::try_from(number - 1).map_err(|_| unknown("number of a root", number))?,
                ),
            },
            from_path: path(r)?,
        },
        REMOVE => StreamItem::Remove(path(r)?),
        AT => StreamItem::At(path(r)?),
        DATA => StreamItem::Data {
            offset: r.varint()?,
            bytes: r.bytes(DATA_BYTES_MAX)?,
        },
        HOLE => StreamItem::Hole {
            offset: r.varint()?,
            len: r.varint()?,
        },
        SIZE => StreamItem::Size(r.varint()?),
        ATTRIBUTES => StreamItem::Attributes(take_attributes(r)?),
        FLAGS => match r.u8()? {
            flags if flags & !(FLAG_NO_ATIME | FLAG_NO_DUMP) != 0 => {
                return Err(unknown("flags of an object", flags.into()));
            }
            flags => StreamItem::Flags(SentFlags {
                no_atime: flags & FLAG_NO_ATIME != 0,
                no_dump: flags & FLAG_NO_DUMP != 0,
            }),
        },
        XATTR => StreamItem::Xattr {
            name: r.bytes(NAME_BYTES_MAX)?,
            value: r.bytes(VALUE_BYTES_MAX)?,
        },
        NO_XATTR => StreamItem::NoXattr(r.bytes(NAME_BYTES_MAX)?),
        END => StreamItem::End(r.varint()?),
        BEGIN => StreamItem::Begin(r.u32()?),
        _ => return Err(unknown("tag of an item", tag.into())),
    })
}

fn take_root<'a>(r: &mut Reader<'a>) -> Decoded<StreamItem<'a>> {
    let (name, id) = (r.bytes(NAME_BYTES_MAX)?, take_id(r)?);
    let (has_base, base) = (r.u8()?, take_id(r)?);
    let base = match has_base {
        0 if base == StreamId::default() => None,
        1 => Some(base),
        found => return Err(unknown("base of a root", found.into())),
    };
    Ok(StreamItem::Root { name, id, base })
}

fn take_new<'a>(r: &mut Reader<'a>, tag: u8) -> Decoded<NewObject<'a>> {
    Ok(match tag {
        DIRECTORY => NewObject::Directory,
        FILE => NewObject::File(r.varint()?),
        SYMLINK => NewObject::Symlink(r.bytes(TARGET_BYTES_MAX)?),
        _ => {
            let bits = r.u32()?;
            let kind = Kind::from_mode(bits).filter(|_| bits & !S_IFMT == 0);
            match kind {
                None | Some(Kind::Directory | Kind::Regular | Kind::Symlink) => {
                    return Err(unknown("kind of an object", bits.into()));
                }
                Some(kind) => NewObject::Special(kind, r.u32()?),
            }
        }
    })
}

fn take_attributes(r: &mut Reader<'_>) -> Decoded<SentAttributes> {
    let (perm, uid, gid) = (r.u32()?, r.u32()?, r.u32()?);
    if perm & !0o7777 != 0 {
        return Err(unknown("permission bits", perm.into()));
    }
    let mut time = || {
        let (secs, nanos) = (r.u64()?.cast_signed(), r.u32()?);
        if nanos >= NANOS_PER_SEC {
            return Err(unknown("nanoseconds", nanos.into()));
        }
        Ok(Time { secs, nanos })
    };
    Ok(SentAttributes {
        perm,
        uid,
        gid,
        atime: time()?,
        mtime: time()?,
    })
}

/// Refuses names that no entry can have, and places beyond the end of the longest file.
fn check_item(item: &StreamItem<'_>) -> Result<()> {
    let named = |path: &[u8]| match path {
        b"" => Err(Error::Invalid("a path without a name")),
        path => check_path(path),
    };
    let fits = |offset: u64, len: u64| match offset.checked_add(len) {
        Some(end) if end <= FILE_BYTES_MAX => Ok(()),
        _ => Err(Error::TooBig),
    };
    match *item {
        StreamItem::Root { name, .. } => check_name(name),
        StreamItem::Make { path, object } => match object {
            NewObject::Directory => check_path(path),
            NewObject::File(bytes) => fits(0, bytes).and_then(|()| named(path)),
            NewObject::Symlink(target) if target.is_empty() || target.contains(&0) => {
                Err(Error::Invalid("target of a symbolic link"))
            }
            NewObject::Symlink(_) | NewObject::Special(..) => named(path),
        },
        StreamItem::Link { path, first } => named(path).and_then(|()| named(first)),
        StreamItem::Copy {
            path, from_path, ..
        } => check_path(path).and_then(|()| check_path(from_path)),
        StreamItem::Remove(path) => named(path),
        StreamItem::At(path) => check_path(path),
        StreamItem::Data { offset, bytes } => fits(offset, bytes.len() as u64),
        StreamItem::Hole { offset, len } => fits(offset, len),
        StreamItem::Size(bytes) => fits(0, bytes),
        StreamItem::Xattr { name, .. } | StreamItem::NoXattr(name) => match name {
            b"" => Err(Error::Invalid("name of an attribute")),
            name if name.contains(&0) => Err(Error::Invalid("name of an attribute")),
            _ => Ok(()),
        },
        StreamItem::Begin(_)
        | StreamItem::Attributes(_)
        | StreamItem::Flags(_)
        | StreamItem::End(_) => Ok(()),
    }
}

/// Refuses a path of which a name is none that an entry can have. The empty path is the top.
fn check_path(path: &[u8]) -> Result<()> {
    if path.is_empty() {
        return Ok(());
    }
    path.split(|&byte| byte == b'/').try_for_each(check_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Vec<StreamItem<'static>> {
        let time = |secs, nanos| Time { secs, nanos };
        vec![
            StreamItem::Root {
                name: b"home",
                id: StreamId([7; 16]),
                base: None,
            },
            StreamItem::Begin(0),
            StreamItem::Make {
                path: b"",
                object: NewObject::Directory,
            },
            StreamItem::Make {
                path: b"a/b",
                object: NewObject::File(300),
            },
            StreamItem::Data {
                offset: 0,
                bytes: b"abc",
            },
            StreamItem::Hole {
                offset: 4096,
                len: 1,
            },
            StreamItem::Attributes(SentAttributes {
                perm: 0o4755,
                uid: 1,
                gid: 2,
                atime: time(-1, 7),
                mtime: time(9, 8),
            }),
            StreamItem::Flags(SentFlags {
                no_atime: true,
                no_dump: true,
            }),
            StreamItem::Xattr {
                name: b"user.a",
                value: b"v",
            },
            StreamItem::NoXattr(b"user.b"),
            StreamItem::Make {
                path: b"s",
                object: NewObject::Symlink(b"t"),
            },
            StreamItem::Make {
                path: b"p",
                object: NewObject::Special(Kind::Fifo, 5),
            },
            StreamItem::Link {
                path: b"d",
                first: b"a/b",
            },
            StreamItem::Root {
                name: b"next",
                id: StreamId([8; 16]),
                base: Some(StreamId([7; 16])),
            },
            StreamItem::Copy {
                path: b"",
                from: CopyFrom::Root(0),
                from_path: b"a",
            },
            StreamItem::Copy {
                path: b"c",
                from: CopyFrom::Base,
                from_path: b"",
            },
            StreamItem::Remove(b"a"),
            StreamItem::At(b"b"),
            StreamItem::Size(128),
            StreamItem::End(19),
        ]
    }

    fn bytes() -> Vec<u8> {
        let mut w = Writer::new();
        sample().iter().for_each(|item| item.encode(&mut w));
        w.into_vec()
    }

    #[test]
    fn golden_bytes_of_items() {
        let mut want = b"\x01\x04home".to_vec();
        want.extend([&[7; 16][..], &[0], &[0; 16]].concat());
        want.extend(b"\x12\0\0\0\0\x02\0\x03\x03a/b\xac\x02\x0a\0\x03abc\x0b\x80\x20\x01");
        want.extend(b"\x0d\xed\x09\0\0\x01\0\0\0\x02\0\0\0");
        want.extend(
            [
                &[0xff; 8][..],
                &[7, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0],
            ]
            .concat(),
        );
        want.extend(b"\x0e\x03\x0f\x06user.a\x01v\x10\x06user.b\x04\x01s\x01t");
        want.extend(b"\x05\x01p\0\x10\0\0\x05\0\0\0\x06\x01d\x03a/b");
        want.extend([&b"\x01\x04next"[..], &[8; 16], &[1], &[7; 16]].concat());
        want.extend(b"\x07\0\x01\x01a\x07\x01c\0\0\x08\x01a\x09\x01b\x0c\x80\x01\x11\x13");
        assert_eq!(bytes(), want);
    }

    #[test]
    fn golden_bytes_of_head_and_section() {
        let id = StreamId(*b"0123456789abcdef");
        let head = encode_stream_head(id);
        assert_eq!(&head[..32], b"RAMETSND\x01\0\0\0\0\0\0\x000123456789abcdef");
        assert_eq!(head[32..], 0xb237_6304_411c_d5a3_u64.to_le_bytes());
        let section = Sections::behind(id, (4, 7)).encode(b"\x11\x12", true);
        assert_eq!(
            &section[..24],
            b"rSec\0\x01\0\0\x05\0\0\0\0\0\0\0\x02\0\0\0\x02\0\0\0"
        );
        assert_eq!(section[24..32], 0x0929_924a_02ea_059d_u64.to_le_bytes());
        assert_eq!(&section[32..], b"\x11\x12");
    }

    #[test]
    fn items_come_back_and_cut_items_are_refused() {
        let bytes = bytes();
        let mut items = StreamItems::new(&bytes);
        for item in sample() {
            assert_eq!(items.next_item().unwrap(), Some(item));
        }
        assert_eq!(items.next_item().unwrap(), None);
        let mut refused = 0;
        for len in 0..bytes.len() {
            let mut items = StreamItems::new(&bytes[..len]);
            refused += loop {
                match items.next_item() {
                    Ok(Some(_)) => {}
                    Ok(None) => break 0,
                    Err(_) => break 1,
                }
            };
        }
        assert_eq!(refused, bytes.len() - sample().len());
    }

    fn refusal(item: &StreamItem<'_>) -> Option<Error> {
        let mut w = Writer::new();
        item.encode(&mut w);
        StreamItems::new(w.as_slice()).next_item().err()
    }

    #[test]
    fn paths_that_lead_out_and_places_beyond_all_files_are_refused() {
        let long = [b'x'; 256];
        let wrong: [&[u8]; 9] = [
            b"..", b"a/..", b"a/../b", b".", b"/a", b"a/", b"a//b", b"a\0b", &long,
        ];
        for path in wrong {
            let object = NewObject::Directory;
            assert!(
                refusal(&StreamItem::Make { path, object }).is_some(),
                "{path:?}"
            );
            assert!(refusal(&StreamItem::At(path)).is_some());
            assert!(refusal(&StreamItem::Remove(path)).is_some());
            assert!(refusal(&StreamItem::Link { path, first: b"a" }).is_some());
            assert!(
                refusal(&StreamItem::Link {
                    path: b"a",
                    first: path
                })
                .is_some()
            );
            let (from, from_path) = (CopyFrom::Base, path);
            let copy = StreamItem::Copy {
                path: b"a",
                from,
                from_path,
            };
            assert!(refusal(&copy).is_some());
        }
        let root = |name| StreamItem::Root {
            name,
            id: StreamId::default(),
            base: None,
        };
        assert!(refusal(&root(b"a/b")).is_some() && refusal(&root(b"ab")).is_none());
        assert!(refusal(&StreamItem::Remove(b"")).is_some());
        assert!(refusal(&StreamItem::Size(u64::MAX)).is_some());
        let (offset, bytes) = (FILE_BYTES_MAX, &b"x"[..]);
        assert!(refusal(&StreamItem::Data { offset, bytes }).is_some());
        assert!(
            refusal(&StreamItem::Hole {
                offset: 1,
                len: u64::MAX
            })
            .is_some()
        );
        assert!(refusal(&StreamItem::NoXattr(b"user.a\0")).is_some());
    }

    #[test]
    fn sections_out_of_order_of_other_streams_and_with_other_bytes_are_refused() {
        let id = StreamId([1; 16]);
        let items = vec![b'a'; 5000];
        let mut encoder = Sections::of(id);
        let first = encoder.encode(&items, false);
        let behind_first = encoder;
        let second = encoder.encode(b"b", true);
        let open = |mut sections: Sections, bytes: &[u8]| -> Result<Vec<u8>> {
            let head: &[u8; SECTION_HEAD_BYTES] = bytes.first_chunk().unwrap();
            let found = SectionHead::decode(head)?;
            let items = sections.open((head, &found), &bytes[SECTION_HEAD_BYTES..])?;
            assert_eq!(found.number, sections.done().0);
            Ok(items)
        };
        assert!(first.len() < 200, "a section is compressed");
        assert_eq!(open(Sections::of(id), &first).unwrap(), items);
        assert_eq!(open(behind_first, &second).unwrap(), b"b");
        assert!(open(Sections::of(id), &second).is_err());
        assert!(open(Sections::behind(id, (1, 0)), &second).is_err());
        assert!(open(Sections::of(StreamId([2; 16])), &first).is_err());
        for at in 0..second.len() {
            for bit in 0..8 {
                let mut wrong = second.clone();
                wrong[at] ^= 1 << bit;
                assert!(open(behind_first, &wrong).is_err(), "{at} {bit}");
            }
        }
        let mut head = encode_stream_head(id);
        assert_eq!(decode_stream_head(&head).unwrap(), id);
        for at in 0..head.len() {
            head[at] ^= 1;
            assert!(decode_stream_head(&head).is_err(), "{at}");
            head[at] ^= 1;
        }
    }
}
