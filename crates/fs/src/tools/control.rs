//! The control ioctls of a mounted volume, for operations that FUSE has no request for.
//!
//! Every call goes to an open descriptor of a *directory* of the mount (read-only is enough). All
//! structures have a fixed size, as the kernel copies as many bytes as the number says, and are
//! little-endian on every machine. Strings are bytes with a length, zero-padded.
//!
//! | number | name | direction | structure |
//! | --- | --- | --- | --- |
//! | 1 | [`CLONE`] | in | [`CloneRequest`] |
//! | 2 | [`REMOVE`] | in | [`NameRequest`] |
//! | 3 | [`SYNC`] | none | |
//! | 4 | [`STAT`] | out | [`decode_stat_reply`] |
//! | 5 | [`CHECKPOINT`] | none | |
//! | 6 | [`SOURCE`] | in, out | [`NameRequest`] or [`LookRequest`], answered by a [`SourceReply`] |
//! | 7 | [`DIFF`] | in and out | [`DiffRequest`], then a page of [`Difference`]s |
//! | 8 | [`USAGE`] | out | [`Usage`] |
//! | 9 | [`SCRUB`] | in and out | [`ScrubRequest`], then a [`ScrubPage`](crate::ScrubPage) |
//! | 10 | [`GROW`] | in | new size of the volume in bytes, u64 |
//! | 11 | [`FENCE`] | in and out | a `Fence` (`tools/fence.rs`) |
//! | 12 | [`IMPORT`] | out | token of the import, u64; on a file without a name |
//! | 13 | [`PUBLISH`] | in and out | [`PublishRequest`], answered by [`ImportCounts`] |
//! | 14 | [`SNAPSHOT`] | in and out | [`SnapshotRequest`](crate::SnapshotRequest), answered by a [`SnapshotReply`](crate::SnapshotReply) |
//! | 15 | [`STAGE`] | in and out | [`StageRequest`](crate::StageRequest), answered by a [`StageReply`](crate::StageReply) |
//! | 16 | [`FORK`] | in and out | [`ForkRequest`](crate::ForkRequest), answered by a [`ForkReply`](crate::ForkReply) |
//! | 17 | [`SEND`] | in and out | [`SendRequest`](crate::SendRequest), answered by a [`SendPage`](crate::SendPage) |
//!
//! The kernel checks no permission for an ioctl; the daemon does, see
//! [`crate::Trees::clone_entry`].
//!
//! A clone has two directories and a call has one descriptor. So its source is named first, in a
//! directory that the caller holds open ([`SOURCE`]). The answer is a *clone token*: a random
//! number that names the source once. An inode number would not do: a user confined to a part of
//! the mount, by a bind mount or a chroot, could guess the numbers of the rest. A token that is not
//! used keeps its object, also one that is removed meanwhile, until the first call about a source
//! after a minute. So a caller that only compares the number of the object asks for no token
//! ([`LookRequest`]). `docs/fs.md` tells for each call how it names its objects ("Calls in a part of
//! the volume").

use std::io;
use std::os::fd::AsFd;

use ramet_betree::Usage;
use ramet_sys::control_ioctl;

use crate::error::{Error, Result};
use crate::format::name::NAME_BYTES_MAX;
use crate::ops::clone::CloneMode;
use crate::ops::import_stage::ImportCounts;
use crate::tools::diff::{Change, Difference};

const DIR_IN: u32 = 1;
const DIR_OUT: u32 = 2;
const GROUP: u32 = b'R' as u32;

const fn number(direction: u32, nr: u32, size_bytes: usize) -> u32 {
    assert!(
        size_bytes < 1 << 14,
        "the kernel gives the size of an ioctl 14 bits"
    );
    (direction << 30) | ((size_bytes as u32) << 16) | (GROUP << 8) | nr
}

const NAME_FIELD_BYTES: usize = 256;
/// Size of an encoded [`CloneRequest`].
pub const CLONE_BYTES: usize = 16 + NAME_FIELD_BYTES;
/// Size of an encoded [`NameRequest`].
pub const NAME_REQUEST_BYTES: usize = 8 + NAME_FIELD_BYTES;
/// Size of the answer to [`STAT`].
pub const STAT_BYTES: usize = 16 * 1024 - 4;

/// Clones a file or a directory tree to a name in the directory the call is made on.
pub const CLONE: u32 = number(DIR_IN, 1, CLONE_BYTES);
/// Removes a name in the directory the call is made on, with everything below it.
pub const REMOVE: u32 = number(DIR_IN, 2, NAME_REQUEST_BYTES);
/// Makes everything that was handed to the daemon before the call durable.
pub const SYNC: u32 = number(0, 3, 0);
/// Tells the counters of the volume, as JSON.
pub const STAT: u32 = number(DIR_OUT, 4, STAT_BYTES);
/// Key of a counter that [`STAT`] tells of a mount: bytes that programs stored through mappings and
/// that could not be written back.
pub const FAILED_WRITE_BACKS: &str = "failed_write_backs";
/// Writes a checkpoint and waits for it.
pub const CHECKPOINT: u32 = number(0, 5, 0);
/// Gives a token for a name in the directory the call is made on, or for that directory (`.`). The
/// caller needs search on it.
pub const SOURCE: u32 = number(DIR_IN | DIR_OUT, 6, NAME_REQUEST_BYTES);

/// Compares the tree of the directory the call is made on with another. The first call has
/// [`DIFF_START`] and the token of the other directory. The next ones have neither, until a page
/// says that it is the last.
pub const DIFF: u32 = number(DIR_IN | DIR_OUT, 7, DIFF_PAGE_BYTES);
/// Tells the space of the tree of the directory the call is made on.
pub const USAGE: u32 = number(DIR_OUT, 8, USAGE_BYTES);

/// Reads everything on the volume again. The call is made on the root of the volume. The first call
/// has [`SCRUB_START`]. The next ones do not, until an answer says that it is the last.
pub const SCRUB: u32 = number(DIR_IN | DIR_OUT, 9, STAT_BYTES);
/// Makes the volume longer, and its image file. Root and the owner of the daemon may, on the root of
/// the volume.
pub const GROW: u32 = number(DIR_IN, 10, 8);
/// Size of a request and of an answer of [`FENCE`].
pub const FENCE_BYTES: usize = 32;
/// Raises a fence behind the requests that are queued, and tells whether it has passed: see
/// `tools/fence.rs`.
pub const FENCE: u32 = number(DIR_IN | DIR_OUT, 11, FENCE_BYTES);

/// Begins an import on a file without a name (`O_TMPFILE`), which is open for writing and empty.
/// Writes to it are frames from then on, one behind the other; the import ends with the file.
pub const IMPORT: u32 = number(DIR_OUT, 12, 8);
/// Gives the tree of an import its name in the directory the call is made on.
pub const PUBLISH: u32 = number(DIR_IN | DIR_OUT, 13, PUBLISH_BYTES);
/// Makes, removes and tells snapshots of the volume. A call that names one is made on the root of the
/// volume, or has a token of it. Request and answer are JSON behind its length, as in the answer to
/// [`STAT`].
pub const SNAPSHOT: u32 = number(DIR_IN | DIR_OUT, 14, STAT_BYTES);
/// Stages a change of a name in the directory the call is made on, which rename(2) then makes.
/// Request and answer are JSON behind its length, as in the answer to [`STAT`].
pub const STAGE: u32 = number(DIR_IN | DIR_OUT, 15, STAGE_BYTES);
/// Makes, removes, resets and tells forks. Request and answer are JSON behind its length, as in the
/// answer to [`STAT`].
pub const FORK: u32 = number(DIR_IN | DIR_OUT, 16, STAT_BYTES);
/// Makes a stream of directory trees. The request is JSON behind its length, as in the answer to
/// [`STAT`]. Root and the owner of the daemon may.
pub const SEND: u32 = number(DIR_IN | DIR_OUT, 17, STAT_BYTES);
/// Size of a request and of an answer of [`STAGE`].
pub const STAGE_BYTES: usize = STAT_BYTES;
/// Size of a request and of an answer of [`PUBLISH`].
pub const PUBLISH_BYTES: usize = 16 + NAME_FIELD_BYTES;

/// The request of [`PUBLISH`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishRequest {
    /// The answer to [`IMPORT`]. It serves its user only.
    pub token: u64,
    /// Name of the tree: 1 to 255 bytes, no NUL, no `/`.
    pub name: Vec<u8>,
}

impl PublishRequest {
    /// The bytes of the call.
    ///
    /// # Errors
    /// `NameTooLong` when the name has more than 255 bytes.
    pub fn encode(&self) -> Result<[u8; PUBLISH_BYTES]> {
        let mut out = [0; PUBLISH_BYTES];
        out[8..16].copy_from_slice(&self.token.to_le_bytes());
        let name_len = put_name(&mut out[16..], &self.name)?;
        out[4..8].copy_from_slice(&name_len.to_le_bytes());
        Ok(out)
    }

    /// Decodes the bytes of [`PublishRequest::encode`].
    ///
    /// # Errors
    /// `Invalid` when the size, a reserved byte or the name is not one this version knows.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        if bytes.len() != PUBLISH_BYTES || u32_at(bytes, 0) != 0 {
            return Err(Error::Invalid("size or flag of a publish request"));
        }
        Ok(Self {
            token: u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes")),
            name: take_name(&bytes[16..], u32_at(bytes, 4))?,
        })
    }
}

/// The answer to [`PUBLISH`].
#[must_use]
pub fn encode_import_counts(counts: &ImportCounts) -> [u8; PUBLISH_BYTES] {
    let mut out = [0; PUBLISH_BYTES];
    for (at, count) in counts.fields().into_iter().enumerate() {
        out[8 * at..8 * at + 8].copy_from_slice(&count.to_le_bytes());
    }
    out
}

/// Decodes the answer to [`PUBLISH`].
///
/// # Errors
/// `Invalid` when the bytes are too few.
pub fn decode_import_counts(bytes: &[u8]) -> Result<ImportCounts> {
    let mut fields = [0; ImportCounts::FIELDS];
    let (words, _) = bytes.as_chunks::<8>();
    let words = words
        .get(..fields.len())
        .ok_or(Error::Invalid("answer to a publish request"))?;
    for (field, word) in fields.iter_mut().zip(words) {
        *field = u64::from_le_bytes(*word);
    }
    Ok(ImportCounts::of_fields(fields))
}

/// Flag of [`CloneRequest`]: fail with `EEXIST` when the destination exists. The same as no flag.
pub const CLONE_NO_REPLACE: u32 = 1;
/// Flag of [`CloneRequest`]: replace the destination, whole and atomically. A directory replaces
/// only a directory (`ENOTDIR`), and any other object replaces any but a directory (`EISDIR`).
pub const CLONE_REPLACE: u32 = 2;

/// The request of [`CLONE`]. The directory of the call is the destination's parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CloneRequest {
    /// [`CLONE_REPLACE`], [`CLONE_NO_REPLACE`] or 0.
    pub flags: u32,
    /// Token of the source, the answer to [`SOURCE`]. It serves once, and only its user.
    pub source: u64,
    /// Name of the destination: 1 to 255 bytes, no NUL, no `/`.
    pub name: Vec<u8>,
}

impl CloneRequest {
    /// The bytes of the call.
    ///
    /// # Errors
    /// `NameTooLong` when the name has more than 255 bytes.
    pub fn encode(&self) -> Result<[u8; CLONE_BYTES]> {
        let mut out = [0; CLONE_BYTES];
        out[0..4].copy_from_slice(&self.flags.to_le_bytes());
        out[8..16].copy_from_slice(&self.source.to_le_bytes());
        let name_len = put_name(&mut out[16..], &self.name)?;
        out[4..8].copy_from_slice(&name_len.to_le_bytes());
        Ok(out)
    }

    /// Decodes the bytes of [`CloneRequest::encode`].
    ///
    /// # Errors
    /// `Invalid` when the size, a flag or the name is not one this version knows.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        if bytes.len() != CLONE_BYTES {
            return Err(Error::Invalid("size of a clone request"));
        }
        let flags = u32_at(bytes, 0);
        if ![0, CLONE_NO_REPLACE, CLONE_REPLACE].contains(&flags) {
            return Err(Error::Invalid("flags of a clone request"));
        }
        let name = take_name(&bytes[16..], u32_at(bytes, 4))?;
        let source = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
        Ok(Self {
            flags,
            source,
            name,
        })
    }

    /// How the clone treats a destination that exists.
    #[must_use]
    pub fn mode(&self) -> CloneMode {
        if self.flags & CLONE_REPLACE == 0 {
            CloneMode::New
        } else {
            CloneMode::Replace
        }
    }
}

/// Flag of [`ScrubRequest`]: begin anew instead of going on.
pub const SCRUB_START: u32 = 1;

/// The request of [`SCRUB`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubRequest {
    /// [`SCRUB_START`] or 0.
    pub flags: u32,
    /// A number that the calls of one scrub have in common. The caller chooses it at random.
    pub session: u64,
}

impl ScrubRequest {
    /// The bytes of the call.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; STAT_BYTES];
        out[0..4].copy_from_slice(&self.flags.to_le_bytes());
        out[8..16].copy_from_slice(&self.session.to_le_bytes());
        out
    }

    /// Decodes the bytes of [`ScrubRequest::encode`].
    ///
    /// # Errors
    /// `Invalid` when the size or a flag is not one this version knows.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        if bytes.len() != STAT_BYTES || u32_at(bytes, 0) & !SCRUB_START != 0 {
            return Err(Error::Invalid("size or flag of a scrub request"));
        }
        Ok(Self {
            flags: u32_at(bytes, 0),
            session: u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes")),
        })
    }
}

/// Flag of [`DiffRequest`]: compare anew instead of going on.
pub const DIFF_START: u32 = 1;
/// Size of a request and of an answer of [`DIFF`].
pub const DIFF_PAGE_BYTES: usize = 16 * 1024 - 4;
/// Size of the answer to [`USAGE`].
pub const USAGE_BYTES: usize = 32;

/// The request of [`DIFF`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiffRequest {
    /// [`DIFF_START`] or 0.
    pub flags: u32,
    /// With [`DIFF_START`] the token of the second directory.
    pub other: u64,
    /// A number that the calls of one comparison have in common. The caller chooses it at random.
    pub session: u64,
}

impl DiffRequest {
    /// The bytes of the call.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; DIFF_PAGE_BYTES];
        out[0..4].copy_from_slice(&self.flags.to_le_bytes());
        out[8..16].copy_from_slice(&self.other.to_le_bytes());
        out[16..24].copy_from_slice(&self.session.to_le_bytes());
        out
    }

    /// Decodes the bytes of [`DiffRequest::encode`].
    ///
    /// # Errors
    /// `Invalid` when the size or a flag is not one this version knows.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        if bytes.len() != DIFF_PAGE_BYTES || u32_at(bytes, 0) & !DIFF_START != 0 {
            return Err(Error::Invalid("size or flag of a diff request"));
        }
        Ok(Self {
            flags: u32_at(bytes, 0),
            other: u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes")),
            session: u64::from_le_bytes(bytes[16..24].try_into().expect("eight bytes")),
        })
    }
}

const ADDED: u8 = 1;
const REMOVED: u8 = 2;
const KIND: u8 = 4;
const CONTENT: u8 = 8;
const METADATA: u8 = 16;
const IS_DIR: u8 = 32;

fn bit(bit: u8, is_set: bool) -> u8 {
    if is_set { bit } else { 0 }
}

impl Difference {
    pub(crate) fn encoded_bytes(&self) -> usize {
        5 + self.path.len()
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let change = match self.change {
            Change::Added => ADDED,
            Change::Removed => REMOVED,
            Change::Kind => KIND,
            Change::Both { content, metadata } => bit(CONTENT, content) | bit(METADATA, metadata),
        };
        out.push(change | bit(IS_DIR, self.is_dir));
        let len = u32::try_from(self.path.len()).expect("a path is no longer than a key");
        out.extend_from_slice(&len.to_le_bytes());
        out.extend_from_slice(&self.path);
    }

    /// The first difference of `bytes`, and the number of bytes it takes; `None` when it is not
    /// whole. The pages of an answer, joined, are such bytes.
    ///
    /// # Errors
    /// `Invalid` for a change that this version does not know.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>> {
        let (Some(tag), Some(len)) = (bytes.first(), bytes.get(1..5)) else {
            return Ok(None);
        };
        let end = (u32_at(len, 0) as usize).saturating_add(5);
        let Some(path) = bytes.get(5..end) else {
            return Ok(None);
        };
        let change = match tag & !IS_DIR {
            ADDED => Change::Added,
            REMOVED => Change::Removed,
            KIND => Change::Kind,
            both if both & !(CONTENT | METADATA) == 0 && both != 0 => Change::Both {
                content: both & CONTENT != 0,
                metadata: both & METADATA != 0,
            },
            _ => return Err(Error::Invalid("difference of an unknown kind")),
        };
        let difference = Self {
            path: path.to_vec(),
            change,
            is_dir: tag & IS_DIR != 0,
        };
        Ok(Some((difference, end)))
    }
}

/// A comparison, handed out in pages: the bytes of all differences one after the other, cut
/// anywhere.
#[derive(Debug)]
pub struct DiffPages {
    bytes: Vec<u8>,
    at: usize,
}

impl DiffPages {
    /// All pages of a comparison.
    #[must_use]
    pub fn new(differences: &[Difference]) -> Self {
        let mut bytes = Vec::new();
        for difference in differences {
            difference.encode(&mut bytes);
        }
        Self { bytes, at: 0 }
    }

    /// The next answer to [`DIFF`]: the number of bytes it carries, whether it is the last, the
    /// bytes.
    pub fn next_page(&mut self) -> Vec<u8> {
        let mut out = vec![0; DIFF_PAGE_BYTES];
        let rest = &self.bytes[self.at..];
        let len = rest.len().min(DIFF_PAGE_BYTES - 8);
        out[8..8 + len].copy_from_slice(&rest[..len]);
        self.at += len;
        let count = u32::try_from(len).expect("a page is small");
        out[0..4].copy_from_slice(&count.to_le_bytes());
        out[4] = u8::from(self.is_done());
        out
    }

    /// Whether the last page was handed out.
    pub(crate) fn is_done(&self) -> bool {
        self.at == self.bytes.len()
    }
}

/// The bytes that an answer to [`DIFF`] carries, and whether it is the last.
///
/// # Errors
/// `Invalid` when the bytes are not such an answer.
pub fn decode_diff_page(page: &[u8]) -> Result<(&[u8], bool)> {
    let invalid = Error::Invalid("answer to a diff request");
    if page.len() < 8 {
        return Err(invalid);
    }
    let end = (u32_at(page, 0) as usize).saturating_add(8);
    Ok((page.get(8..end).ok_or(invalid)?, page[4] != 0))
}

/// The request of [`REMOVE`] and [`SOURCE`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameRequest {
    /// 1 to 255 bytes, no NUL, no `/`.
    pub name: Vec<u8>,
}

impl NameRequest {
    /// The bytes of the call.
    ///
    /// # Errors
    /// `NameTooLong` when the name has more than 255 bytes.
    pub fn encode(&self) -> Result<[u8; NAME_REQUEST_BYTES]> {
        let mut out = [0; NAME_REQUEST_BYTES];
        let name_len = put_name(&mut out[8..], &self.name)?;
        out[4..8].copy_from_slice(&name_len.to_le_bytes());
        Ok(out)
    }

    /// Decodes the bytes of [`NameRequest::encode`].
    ///
    /// # Errors
    /// `Invalid` when the size, a flag or the name is not one this version knows.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        if bytes.len() != NAME_REQUEST_BYTES {
            return Err(Error::Invalid("size of a request by name"));
        }
        if u32_at(bytes, 0) != 0 {
            return Err(Error::Invalid("unknown flag of a request by name"));
        }
        Ok(Self {
            name: take_name(&bytes[8..], u32_at(bytes, 4))?,
        })
    }
}

/// The flag of a [`LookRequest`].
const LOOK: u32 = 1;

/// A request of [`SOURCE`] that asks for no token: the answer has token 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookRequest(pub NameRequest);

impl LookRequest {
    /// The bytes of the call.
    ///
    /// # Errors
    /// `NameTooLong` when the name has more than 255 bytes.
    pub fn encode(&self) -> Result<[u8; NAME_REQUEST_BYTES]> {
        let mut out = self.0.encode()?;
        out[0..4].copy_from_slice(&LOOK.to_le_bytes());
        Ok(out)
    }

    /// Decodes the bytes of [`LookRequest::encode`]; `None` for those of a [`NameRequest`].
    ///
    /// # Errors
    /// `Invalid` when the size or the name is not one this version knows.
    pub fn decode(bytes: &[u8]) -> Result<Option<Self>> {
        if bytes.len() != NAME_REQUEST_BYTES || u32_at(bytes, 0) != LOOK {
            return Ok(None);
        }
        let name = take_name(&bytes[8..], u32_at(bytes, 4))?;
        Ok(Some(Self(NameRequest { name })))
    }
}

/// Clones the entry `source` of the open directory `above` to the new entry `copy` of the open
/// directory `into`, with two calls.
///
/// # Errors
/// `InvalidInput` for a name that no entry can have; otherwise the answer of the daemon:
/// `AlreadyExists` when there is a `copy`.
pub fn clone_by_ioctl(
    above: impl AsFd,
    source: &[u8],
    into: impl AsFd,
    copy: &[u8],
) -> io::Result<()> {
    let invalid = |error: Error| io::Error::new(io::ErrorKind::InvalidInput, error);
    let source = NameRequest {
        name: source.to_vec(),
    };
    let mut named = source.encode().map_err(invalid)?;
    control_ioctl(above, SOURCE, &mut named)?;
    let request = CloneRequest {
        flags: 0,
        source: decode_source_reply(&named).map_err(io::Error::other)?.token,
        name: copy.to_vec(),
    };
    control_ioctl(into, CLONE, &mut request.encode().map_err(invalid)?)
}

/// The answer to [`SOURCE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceReply {
    /// The number that names the object in one call.
    pub token: u64,
    /// The inode number of the object, as stat(2) shows it. The caller compares it with the object
    /// that it opened: another object may have taken the name since.
    pub ino: u64,
}

/// The bytes that answer [`SOURCE`].
#[must_use]
pub fn encode_source_reply(reply: SourceReply) -> [u8; NAME_REQUEST_BYTES] {
    let mut out = [0; NAME_REQUEST_BYTES];
    out[0..8].copy_from_slice(&reply.token.to_le_bytes());
    out[8..16].copy_from_slice(&reply.ino.to_le_bytes());
    out
}

/// Decodes the bytes of [`encode_source_reply`].
///
/// # Errors
/// `Invalid` when the bytes are not such an answer.
pub fn decode_source_reply(bytes: &[u8]) -> Result<SourceReply> {
    let field = |at: usize| {
        let bytes = bytes.get(at..at + 8)?.first_chunk()?;
        Some(u64::from_le_bytes(*bytes))
    };
    match (field(0), field(8)) {
        (Some(token), Some(ino)) => Ok(SourceReply { token, ino }),
        _ => Err(Error::Invalid("answer to a source request")),
    }
}

/// The bytes that answer [`STAT`] and [`SCRUB`], and those of [`SNAPSHOT`]: the length of the JSON text, then the text.
///
/// # Errors
/// `Range` when the text does not fit.
pub fn encode_stat_reply(json: &str) -> Result<Vec<u8>> {
    if json.len() > STAT_BYTES - 4 {
        return Err(Error::Range);
    }
    let mut out = vec![0; STAT_BYTES];
    let len = u32::try_from(json.len()).map_err(|_| Error::Range)?;
    out[0..4].copy_from_slice(&len.to_le_bytes());
    out[4..4 + json.len()].copy_from_slice(json.as_bytes());
    Ok(out)
}

/// The JSON text (an encoded [`crate::VolumeStats`] or [`crate::ScrubPage`]) in an answer to
/// [`STAT`] or [`SCRUB`], or that of [`SNAPSHOT`].
///
/// # Errors
/// `Invalid` when the bytes are not such an answer.
pub fn decode_stat_reply(bytes: &[u8]) -> Result<&str> {
    let invalid = Error::Invalid("answer to a stat request");
    let Some(len) = bytes.first_chunk::<4>() else {
        return Err(invalid);
    };
    let end = 4usize.saturating_add(u32::from_le_bytes(*len) as usize);
    let text = bytes.get(4..end).ok_or(invalid.clone())?;
    std::str::from_utf8(text).map_err(|_| invalid)
}

/// The bytes that answer [`USAGE`].
#[must_use]
pub fn encode_usage(usage: &Usage) -> Vec<u8> {
    let fields = [
        usage.logical_bytes,
        usage.shared_bytes,
        usage.exclusive_bytes,
        0,
    ];
    fields
        .iter()
        .flat_map(|field| field.to_le_bytes())
        .collect()
}

/// Decodes the bytes of [`encode_usage`].
///
/// # Errors
/// `Invalid` when the bytes are not such an answer.
pub fn decode_usage(bytes: &[u8]) -> Result<Usage> {
    let field = |n: usize| {
        let bytes = bytes.get(8 * n..8 * n + 8)?;
        Some(u64::from_le_bytes(bytes.try_into().ok()?))
    };
    match (field(0), field(1), field(2)) {
        (Some(logical_bytes), Some(shared_bytes), Some(exclusive_bytes)) => Ok(Usage {
            logical_bytes,
            shared_bytes,
            exclusive_bytes,
        }),
        _ => Err(Error::Invalid("answer to a usage request")),
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn put_name(field: &mut [u8], name: &[u8]) -> Result<u32> {
    if name.len() > NAME_BYTES_MAX {
        return Err(Error::NameTooLong);
    }
    field[..name.len()].copy_from_slice(name);
    u32::try_from(name.len()).map_err(|_| Error::NameTooLong)
}

fn take_name(field: &[u8], len: u32) -> Result<Vec<u8>> {
    let len = len as usize;
    if len > NAME_BYTES_MAX {
        return Err(Error::NameTooLong);
    }
    let name = &field[..len];
    if name.is_empty() || name.contains(&0) || name.contains(&b'/') || name == b".." {
        return Err(Error::Invalid("name in a control request"));
    }
    Ok(name.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_survive_encoding() {
        let clone = CloneRequest {
            flags: CLONE_NO_REPLACE,
            source: 0x0123_4567_89ab_cdef,
            name: vec![0xff; 255],
        };
        let bytes = clone.encode().unwrap();
        assert_eq!(
            bytes[..20],
            [
                1, 0, 0, 0, 255, 0, 0, 0, 0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 1, 255, 255,
                255, 255
            ]
        );
        assert_eq!(CloneRequest::decode(&bytes).unwrap(), clone);
        let source = SourceReply {
            token: 0x0102_0304_0506_0708,
            ino: 9,
        };
        let bytes = encode_source_reply(source);
        assert_eq!(
            bytes[..17],
            [8, 7, 6, 5, 4, 3, 2, 1, 9, 0, 0, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(decode_source_reply(&bytes).unwrap(), source);
        assert!(decode_source_reply(&bytes[..15]).is_err());
        let remove = NameRequest {
            name: b"x".to_vec(),
        };
        let look = LookRequest(remove.clone());
        let bytes = look.encode().unwrap();
        assert!(NameRequest::decode(&bytes).is_err(), "of SOURCE only");
        assert_eq!(LookRequest::decode(&bytes).unwrap(), Some(look));
        let plain = remove.encode().unwrap();
        assert_eq!(LookRequest::decode(&plain).unwrap(), None);
        assert_eq!(
            NameRequest::decode(&remove.encode().unwrap()).unwrap(),
            remove
        );
        let stat = encode_stat_reply("{}").unwrap();
        assert_eq!(decode_stat_reply(&stat).unwrap(), "{}");
    }

    #[test]
    fn a_clone_replaces_only_when_a_flag_says_so() {
        let mode = |flags| {
            let request = CloneRequest {
                flags,
                source: 1,
                name: b"x".to_vec(),
            };
            let bytes = request.encode().unwrap();
            CloneRequest::decode(&bytes).map(|request| request.mode())
        };
        assert_eq!(mode(0).unwrap(), CloneMode::New);
        assert_eq!(mode(CLONE_NO_REPLACE).unwrap(), CloneMode::New);
        assert_eq!(mode(CLONE_REPLACE).unwrap(), CloneMode::Replace);
        for flags in [CLONE_NO_REPLACE | CLONE_REPLACE, 4, 1 << 31] {
            assert!(matches!(mode(flags), Err(Error::Invalid(_))), "{flags}");
        }
    }

    #[test]
    fn ioctl_numbers_are_pinned() {
        assert_eq!(
            [
                CLONE, REMOVE, SYNC, STAT, CHECKPOINT, SOURCE, DIFF, USAGE, GROW, STAGE
            ],
            [
                0x4110_5201,
                0x4108_5202,
                0x5203,
                0xbffc_5204,
                0x5205,
                0xc108_5206,
                0xfffc_5207,
                0x8020_5208,
                0x4008_520a,
                0xfffc_520f
            ]
        );
    }

    #[test]
    fn a_comparison_survives_its_pages() {
        let changes = [
            Change::Added,
            Change::Removed,
            Change::Kind,
            Change::Both {
                content: true,
                metadata: false,
            },
            Change::Both {
                content: true,
                metadata: true,
            },
        ];
        let difference = |n: usize| Difference {
            path: vec![b'p'; n * n % 40_000],
            change: changes[n % changes.len()],
            is_dir: n.is_multiple_of(3),
        };
        for count in [0, 1, 5, 300] {
            let sent: Vec<Difference> = (0..count).map(difference).collect();
            let mut pages = DiffPages::new(&sent);
            let (mut bytes, mut last) = (Vec::new(), false);
            while !last {
                let page = pages.next_page();
                let (part, is_last) = decode_diff_page(&page).unwrap();
                bytes.extend_from_slice(part);
                last = is_last;
            }
            let (mut got, mut rest) = (Vec::new(), &bytes[..]);
            while let Some((difference, len)) = Difference::decode(rest).unwrap() {
                got.push(difference);
                rest = &rest[len..];
            }
            assert_eq!((got, rest), (sent, &b""[..]));
        }
        let request = DiffRequest {
            flags: DIFF_START,
            other: 7,
            session: u64::MAX - 1,
        };
        assert_eq!(DiffRequest::decode(&request.encode()).unwrap(), request);
        let usage = Usage {
            logical_bytes: 1,
            shared_bytes: 2,
            exclusive_bytes: u64::MAX,
        };
        assert_eq!(encode_usage(&usage).len(), USAGE_BYTES);
        assert_eq!(decode_usage(&encode_usage(&usage)).unwrap(), usage);
        assert!(decode_usage(&[0; 23]).is_err());
        assert!(Difference::decode(&[64, 0, 0, 0, 0]).is_err());
        assert!(decode_diff_page(&[0xff; 20]).is_err());
        assert!(DiffRequest::decode(&[2; DIFF_PAGE_BYTES]).is_err());
    }

    #[test]
    fn publications_come_back() {
        let request = PublishRequest {
            token: 7,
            name: b"n".to_vec(),
        };
        let bytes = request.encode().unwrap();
        assert_eq!(PublishRequest::decode(&bytes).unwrap(), request);
        assert!(PublishRequest::decode(&bytes[1..]).is_err());
        let counts = ImportCounts::of_fields([1, 2, 3, 4, 5, 6, 7, 8]);
        let bytes = encode_import_counts(&counts);
        assert_eq!(decode_import_counts(&bytes).unwrap(), counts);
        assert!(decode_import_counts(&bytes[..63]).is_err());
    }

    #[test]
    fn bad_requests_are_refused() {
        assert!(matches!(
            CloneRequest::decode(&[0; 3]),
            Err(Error::Invalid(_))
        ));
        for name in [&b""[..], b"..", b"a/b", b"a\0b"] {
            let bytes = NameRequest {
                name: name.to_vec(),
            }
            .encode()
            .unwrap();
            assert!(
                matches!(NameRequest::decode(&bytes), Err(Error::Invalid(_))),
                "{name:?}"
            );
        }
        let mut bytes = NameRequest {
            name: b"x".to_vec(),
        }
        .encode()
        .unwrap();
        bytes[4] = 0;
        bytes[5] = 1;
        assert!(matches!(
            NameRequest::decode(&bytes),
            Err(Error::NameTooLong)
        ));
    }
}
