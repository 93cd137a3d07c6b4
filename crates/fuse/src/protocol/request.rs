//! Requests of the kernel, decoded once for both transports.
//!
//! A request is a header, the structure of its operation, and a *payload*: names and data of any
//! length. `/dev/fuse` gives all parts in one buffer; a ring gives the structure and the payload in
//! buffers of their own. The answer to READ and to the listings of a directory goes into the place
//! of the payload: these requests have no payload, and bring the room for their answer along.
//!
//! The decoder trusts the kernel's meaning and not its correctness. No length is believed beyond
//! the bytes that exist, names are checked, and a request that does not decode is refused alone.
//! Decoding allocates no memory on the heap.

use ramet_fs::{Ino, SetTime, Time};
use thiserror::Error;

use super::abi::{self, Field, fattr, opcode};

/// Longest name or target of a symbolic link, in bytes; the file system knows shorter limits.
const NAME_BYTES_MAX: usize = 4096;
const NANOS_PER_SECOND: u32 = 1_000_000_000;

/// Number of a request, which its answer names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unique(pub u64);

/// The handle of an open file or directory, as the answer to its opening gave it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FileHandle(pub u64);

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Malformed {
    /// The request ends before a field that it must have.
    #[error("a request of operation {0} ends too early")]
    Short(u32),
    /// A name is empty, too long, or has a byte that no name has.
    #[error("a request of operation {0} has an odd name")]
    Name(u32),
    /// A field has a value that it cannot have.
    #[error("a request of operation {0} has an odd field")]
    Value(u32),
}

/// The fields that every request has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Number of the request.
    pub unique: Unique,
    /// The operation, of [`abi::opcode`].
    pub opcode: u32,
    /// The inode that the request is about. A node id of the protocol is an inode number.
    pub node: Ino,
    /// User of the process that made the system call.
    pub uid: u32,
    /// Group of that process.
    pub gid: u32,
    /// The thread that waits; 0 for a request that the kernel makes by itself.
    pub pid: u32,
    /// Bytes of the request, as the kernel says.
    len: usize,
    extension_bytes: usize,
}

impl Header {
    /// The header at the start of `bytes`; `None` if there are too few.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let header = abi::InHeader::decode(bytes)?;
        Some(Self {
            unique: Unique(header.unique),
            opcode: header.opcode,
            node: Ino(header.node),
            uid: header.uid,
            gid: header.gid,
            pid: header.pid,
            len: usize::try_from(header.len).expect("32 bits"),
            extension_bytes: abi::ALIGN_BYTES * usize::from(header.extensions),
        })
    }
}

/// The agreement of kernel and server about the form of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Form {
    /// Whether SETXATTR has the longer structure (SETXATTR_EXT).
    pub has_setxattr_ext: bool,
}

/// The attributes that a SETATTR sets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Setattr {
    /// The open file through which the change is made.
    pub fh: Option<FileHandle>,
    /// Permission bits, and the type.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Size in bytes.
    pub size: Option<u64>,
    /// Time of the last read.
    pub atime: Option<SetTime>,
    /// Time of the last change of the contents.
    pub mtime: Option<SetTime>,
    /// Time of the last change of the contents or the attributes.
    pub ctime: Option<Time>,
    /// Whether the setuid and setgid bits must be cleared.
    pub kill_suidgid: bool,
}

/// Records of one size, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Records<'a> {
    bytes: &'a [u8],
}

impl Records<'_> {
    /// Inodes and the number of lookups of each that the kernel forgets.
    pub fn forgets(self) -> impl Iterator<Item = (Ino, u64)> {
        self.each::<abi::ForgetOne>()
            .map(|one| (Ino(one.node), one.nlookup))
    }

    /// Offsets and lengths of mappings.
    pub fn mappings(self) -> impl Iterator<Item = (u64, u64)> {
        self.each::<abi::RemovemappingOne>()
            .map(|one| (one.moffset, one.len))
    }

    fn each<T: Field>(self) -> impl Iterator<Item = T> {
        self.bytes.chunks_exact(T::BYTES).map(T::get)
    }
}

/// A request. Names and data lie where the transport has them.
#[derive(Debug, PartialEq, Eq)]
#[expect(
    missing_docs,
    reason = "the names are the kernel's, and mean what they mean there"
)]
pub enum Request<'a> {
    Lookup {
        name: &'a [u8],
    },
    Forget {
        lookups: u64,
    },
    BatchForget {
        forgets: Records<'a>,
    },
    Getattr {
        fh: Option<FileHandle>,
    },
    Setattr(Setattr),
    Readlink,
    Symlink {
        name: &'a [u8],
        target: &'a [u8],
    },
    Mknod {
        name: &'a [u8],
        mode: u32,
        rdev: u32,
        umask: u32,
    },
    Mkdir {
        name: &'a [u8],
        mode: u32,
        umask: u32,
    },
    Unlink {
        name: &'a [u8],
    },
    Rmdir {
        name: &'a [u8],
    },
    /// RENAME, without flags, and RENAME2.
    Rename {
        name: &'a [u8],
        new_dir: Ino,
        new_name: &'a [u8],
        flags: u32,
    },
    /// Another name, in the directory of the header, for an inode.
    Link {
        node: Ino,
        name: &'a [u8],
    },
    Open {
        flags: u32,
    },
    /// `room` is as long as the READ.
    Read {
        fh: FileHandle,
        offset: u64,
        room: &'a mut [u8],
    },
    Write {
        fh: FileHandle,
        offset: u64,
        data: &'a [u8],
        flags: u32,
        /// Flags of open(2) of the description that the process writes to.
        open_flags: u32,
    },
    Statfs,
    Release {
        fh: FileHandle,
    },
    Fsync {
        fh: FileHandle,
        datasync: bool,
    },
    Setxattr {
        name: &'a [u8],
        value: &'a [u8],
        flags: u32,
        extra_flags: u32,
    },
    Getxattr {
        name: &'a [u8],
        size: u32,
    },
    Listxattr {
        size: u32,
    },
    Removexattr {
        name: &'a [u8],
    },
    Flush {
        fh: FileHandle,
    },
    Init(abi::InitIn),
    Opendir {
        flags: u32,
    },
    Readdir {
        fh: FileHandle,
        offset: u64,
        room: &'a mut [u8],
    },
    Readdirplus {
        fh: FileHandle,
        offset: u64,
        room: &'a mut [u8],
    },
    Releasedir {
        fh: FileHandle,
    },
    Fsyncdir {
        fh: FileHandle,
        datasync: bool,
    },
    Getlk(abi::LkIn),
    /// SETLK, and SETLKW, which waits.
    Setlk {
        lock: abi::LkIn,
        waits: bool,
    },
    Access {
        mask: u32,
    },
    Create {
        name: &'a [u8],
        mode: u32,
        umask: u32,
        flags: u32,
    },
    /// A file without a name.
    Tmpfile {
        mode: u32,
        umask: u32,
        flags: u32,
    },
    Interrupt {
        unique: Unique,
    },
    Bmap {
        block: u64,
        block_bytes: u32,
    },
    Destroy,
    Ioctl {
        fh: FileHandle,
        number: u32,
        /// The argument, an address in the memory of the process as a rule.
        arg: u64,
        data: &'a [u8],
        out_bytes: usize,
        flags: u32,
    },
    Poll(abi::PollIn),
    NotifyReply {
        offset: u64,
        data: &'a [u8],
    },
    Fallocate {
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: u32,
    },
    Lseek {
        fh: FileHandle,
        offset: u64,
        whence: u32,
    },
    /// COPY_FILE_RANGE, and COPY_FILE_RANGE_64 with its longer answer.
    CopyFileRange {
        range: CopyRange,
        is_64: bool,
    },
    Setupmapping(abi::SetupmappingIn),
    Removemapping {
        mappings: Records<'a>,
    },
    Syncfs,
    Statx {
        fh: Option<FileHandle>,
        flags: u32,
        mask: u32,
    },
    /// An operation that this server does not know.
    Unknown,
}

/// The range of a copy, from the inode of the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRange {
    /// Offset in the source.
    pub offset_in: u64,
    /// The destination.
    pub node_out: Ino,
    /// Offset in the destination.
    pub offset_out: u64,
    /// Length in bytes.
    pub length: u64,
}

/// The parts of a request behind its header.
struct Parts<'a> {
    opcode: u32,
    structure: &'a [u8],
    payload: &'a [u8],
}

impl<'a> Request<'a> {
    /// Decodes a message of `/dev/fuse`: the first `len` bytes of `buffer`. The rest of the buffer
    /// is room for the answer.
    ///
    /// # Errors
    /// The request must be refused.
    pub fn decode(
        header: &Header,
        buffer: &'a mut [u8],
        len: usize,
        form: Form,
    ) -> Result<Self, Malformed> {
        let short = Malformed::Short(header.opcode);
        let Some(bytes) = abi::structure_bytes(header.opcode, form.has_setxattr_ext) else {
            return Ok(Self::Unknown);
        };
        let behind = abi::InHeader::BYTES + bytes;
        if header.len != len || len < behind || len > buffer.len() {
            return Err(short);
        }
        let (head, payload) = buffer.split_at_mut(behind);
        let structure = &head[abi::InHeader::BYTES..];
        Self::decode_parts(header, structure, payload, len - behind, form)
    }

    /// Decodes a request in three parts, as a ring has them. `structure` may be longer than the
    /// structure of the operation. The first `payload_bytes` of `payload` belong to the request,
    /// and the rest is room for the answer.
    ///
    /// # Errors
    /// The request must be refused.
    pub fn decode_parts(
        header: &Header,
        structure: &'a [u8],
        payload: &'a mut [u8],
        payload_bytes: usize,
        form: Form,
    ) -> Result<Self, Malformed> {
        let operation = header.opcode;
        let short = Malformed::Short(operation);
        let Some(bytes) = abi::structure_bytes(operation, form.has_setxattr_ext) else {
            return Ok(Self::Unknown);
        };
        let structure = structure.get(..bytes).ok_or(short)?;
        // Extensions lie at the end. The server has agreed upon none and ignores them.
        let payload_bytes = payload_bytes
            .checked_sub(header.extension_bytes)
            .ok_or(short)?;
        if payload_bytes > payload.len() {
            return Err(short);
        }
        if matches!(
            operation,
            opcode::READ | opcode::READDIR | opcode::READDIRPLUS
        ) {
            return Self::with_room(operation, abi::ReadIn::get(structure), payload);
        }
        let parts = Parts {
            opcode: operation,
            structure,
            payload: &payload[..payload_bytes],
        };
        parts.decode(form)
    }

    /// Decodes a request that brings room for its answer. A READ that asks for more bytes than its
    /// room has is refused: the kernel would take a short answer for the end of the file. A listing
    /// goes on with the next request.
    fn with_room(
        operation: u32,
        read: abi::ReadIn,
        payload: &'a mut [u8],
    ) -> Result<Self, Malformed> {
        let size = usize::try_from(read.size).expect("32 bits");
        if operation == opcode::READ && size > payload.len() {
            return Err(Malformed::Value(operation));
        }
        let size = size.min(payload.len());
        let (fh, offset, room) = (FileHandle(read.fh), read.offset, &mut payload[..size]);
        Ok(match operation {
            opcode::READDIR => Self::Readdir { fh, offset, room },
            opcode::READDIRPLUS => Self::Readdirplus { fh, offset, room },
            _ => Self::Read { fh, offset, room },
        })
    }
}

impl<'a> Parts<'a> {
    fn get<T: Field>(&self) -> T {
        T::get(self.structure)
    }

    /// The bytes up to a zero. The zero is skipped.
    fn text(&mut self) -> Result<&'a [u8], Malformed> {
        let window = &self.payload[..self.payload.len().min(NAME_BYTES_MAX + 1)];
        let end = window.iter().position(|byte| *byte == 0);
        let end = end.ok_or(if self.payload.len() > NAME_BYTES_MAX {
            Malformed::Name(self.opcode)
        } else {
            Malformed::Short(self.opcode)
        })?;
        let text = &self.payload[..end];
        self.payload = &self.payload[end + 1..];
        if text.is_empty() {
            return Err(Malformed::Name(self.opcode));
        }
        Ok(text)
    }

    /// The name of an entry.
    fn name(&mut self) -> Result<&'a [u8], Malformed> {
        let name = self.text()?;
        if name.contains(&b'/') {
            return Err(Malformed::Name(self.opcode));
        }
        Ok(name)
    }

    /// `size` bytes of data.
    fn data(&self, size: u32) -> Result<&'a [u8], Malformed> {
        let size = usize::try_from(size).expect("32 bits");
        self.payload
            .get(..size)
            .ok_or(Malformed::Short(self.opcode))
    }

    fn records<T: Field>(&self, count: u32) -> Result<Records<'a>, Malformed> {
        let count = usize::try_from(count).expect("32 bits");
        let bytes = count
            .checked_mul(T::BYTES)
            .and_then(|bytes| self.payload.get(..bytes));
        let bytes = bytes.ok_or(Malformed::Short(self.opcode))?;
        Ok(Records { bytes })
    }

    fn time(&self, secs: i64, nanos: u32) -> Result<Time, Malformed> {
        if nanos < NANOS_PER_SECOND {
            Ok(Time { secs, nanos })
        } else {
            Err(Malformed::Value(self.opcode))
        }
    }

    fn setattr(&self) -> Result<Setattr, Malformed> {
        let set: abi::SetattrIn = self.get();
        let has = |flag: u32| set.valid & flag != 0;
        let time = |at: u32, now: u32, secs: i64, nanos: u32| match (has(at), has(now)) {
            (_, true) => Ok(Some(SetTime::Now)),
            (true, false) => self.time(secs, nanos).map(|time| Some(SetTime::At(time))),
            (false, false) => Ok(None),
        };
        let ctime = has(fattr::CTIME).then(|| self.time(set.ctime, set.ctimensec));
        Ok(Setattr {
            fh: has(fattr::FH).then_some(FileHandle(set.fh)),
            mode: has(fattr::MODE).then_some(set.mode),
            uid: has(fattr::UID).then_some(set.uid),
            gid: has(fattr::GID).then_some(set.gid),
            size: has(fattr::SIZE).then_some(set.size),
            atime: time(fattr::ATIME, fattr::ATIME_NOW, set.atime, set.atimensec)?,
            mtime: time(fattr::MTIME, fattr::MTIME_NOW, set.mtime, set.mtimensec)?,
            ctime: ctime.transpose()?,
            kill_suidgid: has(fattr::KILL_SUIDGID),
        })
    }

    fn decode(self, form: Form) -> Result<Request<'a>, Malformed> {
        match self.opcode {
            opcode::LOOKUP
            | opcode::SYMLINK
            | opcode::MKNOD
            | opcode::MKDIR
            | opcode::UNLINK
            | opcode::RMDIR
            | opcode::RENAME
            | opcode::RENAME2
            | opcode::LINK
            | opcode::CREATE => self.decode_naming(),
            opcode::SETXATTR | opcode::GETXATTR | opcode::LISTXATTR | opcode::REMOVEXATTR => {
                self.decode_xattr(form)
            }
            opcode::WRITE
            | opcode::IOCTL
            | opcode::NOTIFY_REPLY
            | opcode::BATCH_FORGET
            | opcode::REMOVEMAPPING => self.decode_data(),
            opcode::SETATTR => self.setattr().map(Request::Setattr),
            _ => Ok(self.decode_structure()),
        }
    }

    /// Requests with names of entries.
    fn decode_naming(mut self) -> Result<Request<'a>, Malformed> {
        let operation = self.opcode;
        let name = self.name()?;
        Ok(match operation {
            opcode::LOOKUP => Request::Lookup { name },
            opcode::SYMLINK => Request::Symlink {
                name,
                target: self.text()?,
            },
            opcode::MKNOD => {
                let abi::MknodIn {
                    mode, rdev, umask, ..
                } = self.get();
                Request::Mknod {
                    name,
                    mode,
                    rdev,
                    umask,
                }
            }
            opcode::MKDIR => {
                let abi::MkdirIn { mode, umask } = self.get();
                Request::Mkdir { name, mode, umask }
            }
            opcode::UNLINK => Request::Unlink { name },
            opcode::RMDIR => Request::Rmdir { name },
            opcode::RENAME => {
                let abi::RenameIn { newdir } = self.get();
                let (new_dir, new_name) = (Ino(newdir), self.name()?);
                Request::Rename {
                    name,
                    new_dir,
                    new_name,
                    flags: 0,
                }
            }
            opcode::RENAME2 => {
                let abi::Rename2In { newdir, flags, .. } = self.get();
                let (new_dir, new_name) = (Ino(newdir), self.name()?);
                Request::Rename {
                    name,
                    new_dir,
                    new_name,
                    flags,
                }
            }
            opcode::LINK => {
                let abi::LinkIn { oldnode } = self.get();
                Request::Link {
                    node: Ino(oldnode),
                    name,
                }
            }
            _ => {
                let abi::CreateIn {
                    flags, mode, umask, ..
                } = self.get();
                Request::Create {
                    name,
                    mode,
                    umask,
                    flags,
                }
            }
        })
    }

    fn decode_xattr(mut self, form: Form) -> Result<Request<'a>, Malformed> {
        Ok(match self.opcode {
            opcode::SETXATTR => {
                let set = if form.has_setxattr_ext {
                    self.get()
                } else {
                    let abi::SetxattrCompatIn { size, flags } = self.get();
                    abi::SetxattrIn {
                        size,
                        flags,
                        ..Default::default()
                    }
                };
                Request::Setxattr {
                    name: self.text()?,
                    value: self.data(set.size)?,
                    flags: set.flags,
                    extra_flags: set.setxattr_flags,
                }
            }
            opcode::GETXATTR => {
                let abi::GetxattrIn { size, .. } = self.get();
                Request::Getxattr {
                    name: self.text()?,
                    size,
                }
            }
            opcode::LISTXATTR => {
                let abi::GetxattrIn { size, .. } = self.get();
                Request::Listxattr { size }
            }
            _ => Request::Removexattr { name: self.text()? },
        })
    }

    /// Requests with data or records.
    fn decode_data(self) -> Result<Request<'a>, Malformed> {
        Ok(match self.opcode {
            opcode::WRITE => {
                let write: abi::WriteIn = self.get();
                Request::Write {
                    fh: FileHandle(write.fh),
                    offset: write.offset,
                    data: self.data(write.size)?,
                    flags: write.write_flags,
                    open_flags: write.flags,
                }
            }
            opcode::IOCTL => {
                let call: abi::IoctlIn = self.get();
                Request::Ioctl {
                    fh: FileHandle(call.fh),
                    number: call.cmd,
                    arg: call.arg,
                    data: self.data(call.in_size)?,
                    out_bytes: usize::try_from(call.out_size).expect("32 bits"),
                    flags: call.flags,
                }
            }
            opcode::NOTIFY_REPLY => {
                let abi::NotifyRetrieveIn { offset, size, .. } = self.get();
                Request::NotifyReply {
                    offset,
                    data: self.data(size)?,
                }
            }
            opcode::BATCH_FORGET => {
                let abi::BatchForgetIn { count, .. } = self.get();
                Request::BatchForget {
                    forgets: self.records::<abi::ForgetOne>(count)?,
                }
            }
            _ => {
                let abi::RemovemappingIn { count } = self.get();
                Request::Removemapping {
                    mappings: self.records::<abi::RemovemappingOne>(count)?,
                }
            }
        })
    }

    /// Requests that are only a structure.
    fn decode_structure(self) -> Request<'a> {
        match self.opcode {
            opcode::FORGET => Request::Forget {
                lookups: self.get::<abi::ForgetIn>().nlookup,
            },
            opcode::GETATTR => {
                let abi::GetattrIn { flags, fh, .. } = self.get();
                Request::Getattr {
                    fh: file_handle(flags, fh),
                }
            }
            opcode::READLINK => Request::Readlink,
            opcode::OPEN => Request::Open {
                flags: self.get::<abi::OpenIn>().flags,
            },
            opcode::OPENDIR => Request::Opendir {
                flags: self.get::<abi::OpenIn>().flags,
            },
            opcode::STATFS => Request::Statfs,
            opcode::INIT => Request::Init(self.init()),
            opcode::ACCESS => Request::Access {
                mask: self.get::<abi::AccessIn>().mask,
            },
            opcode::TMPFILE => {
                let abi::CreateIn {
                    flags, mode, umask, ..
                } = self.get();
                Request::Tmpfile { mode, umask, flags }
            }
            opcode::INTERRUPT => Request::Interrupt {
                unique: Unique(self.get::<abi::InterruptIn>().unique),
            },
            opcode::BMAP => {
                let abi::BmapIn {
                    block, blocksize, ..
                } = self.get();
                Request::Bmap {
                    block,
                    block_bytes: blocksize,
                }
            }
            opcode::DESTROY => Request::Destroy,
            opcode::SYNCFS => Request::Syncfs,
            opcode::STATX => {
                let abi::StatxIn {
                    getattr_flags,
                    fh,
                    sx_flags,
                    sx_mask,
                    ..
                } = self.get();
                let fh = file_handle(getattr_flags, fh);
                Request::Statx {
                    fh,
                    flags: sx_flags,
                    mask: sx_mask,
                }
            }
            _ => self.decode_open(),
        }
    }

    /// Requests that are only a structure, about an open file or directory.
    fn decode_open(self) -> Request<'a> {
        match self.opcode {
            opcode::RELEASE => Request::Release {
                fh: self.released(),
            },
            opcode::RELEASEDIR => Request::Releasedir {
                fh: self.released(),
            },
            opcode::FSYNC => {
                let (fh, datasync) = self.synced();
                Request::Fsync { fh, datasync }
            }
            opcode::FSYNCDIR => {
                let (fh, datasync) = self.synced();
                Request::Fsyncdir { fh, datasync }
            }
            opcode::FLUSH => Request::Flush {
                fh: FileHandle(self.get::<abi::FlushIn>().fh),
            },
            opcode::GETLK => Request::Getlk(self.get()),
            opcode::SETLK => Request::Setlk {
                lock: self.get(),
                waits: false,
            },
            opcode::SETLKW => Request::Setlk {
                lock: self.get(),
                waits: true,
            },
            opcode::POLL => Request::Poll(self.get()),
            opcode::FALLOCATE => {
                let abi::FallocateIn {
                    fh,
                    offset,
                    length,
                    mode,
                    ..
                } = self.get();
                Request::Fallocate {
                    fh: FileHandle(fh),
                    offset,
                    length,
                    mode,
                }
            }
            opcode::LSEEK => {
                let abi::LseekIn {
                    fh, offset, whence, ..
                } = self.get();
                Request::Lseek {
                    fh: FileHandle(fh),
                    offset,
                    whence,
                }
            }
            opcode::COPY_FILE_RANGE => self.copy_file_range(false),
            opcode::COPY_FILE_RANGE_64 => self.copy_file_range(true),
            opcode::SETUPMAPPING => Request::Setupmapping(self.get()),
            _ => Request::Unknown,
        }
    }

    /// The structure of INIT, with zeros for the fields that an older kernel does not send.
    fn init(&self) -> abi::InitIn {
        let mut bytes = [0; abi::InitIn::BYTES];
        let sent = self.payload.len().min(bytes.len());
        bytes[..sent].copy_from_slice(&self.payload[..sent]);
        abi::InitIn::get(&bytes)
    }

    fn released(&self) -> FileHandle {
        FileHandle(self.get::<abi::ReleaseIn>().fh)
    }

    fn synced(&self) -> (FileHandle, bool) {
        let sync: abi::FsyncIn = self.get();
        (
            FileHandle(sync.fh),
            sync.fsync_flags & abi::fsync::FDATASYNC != 0,
        )
    }

    fn copy_file_range(&self, is_64: bool) -> Request<'a> {
        let copy: abi::CopyFileRangeIn = self.get();
        let range = CopyRange {
            offset_in: copy.off_in,
            node_out: Ino(copy.node_out),
            offset_out: copy.off_out,
            length: copy.len,
        };
        Request::CopyFileRange { range, is_64 }
    }
}

fn file_handle(flags: u32, fh: u64) -> Option<FileHandle> {
    (flags & abi::getattr::FH != 0).then_some(FileHandle(fh))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORM: Form = Form {
        has_setxattr_ext: false,
    };

    /// A message as `/dev/fuse` gives it.
    fn message(opcode: u32, parts: &[&[u8]]) -> Vec<u8> {
        let body = parts.concat();
        let header = abi::InHeader {
            len: u32::try_from(abi::InHeader::BYTES + body.len()).unwrap(),
            opcode,
            unique: 5,
            node: 7,
            uid: 1,
            gid: 2,
            pid: 3,
            ..abi::InHeader::default()
        };
        [&header.encode()[..], &body].concat()
    }

    /// Decodes a message as a transport does, with room behind it, and hands the result to `look`.
    fn decode<T>(
        message: &[u8],
        form: Form,
        look: impl FnOnce(Result<Request<'_>, Malformed>) -> T,
    ) -> T {
        let mut buffer = message.to_vec();
        buffer.resize(message.len() + 4096, 0xee);
        let header = Header::decode(message).unwrap();
        look(Request::decode(&header, &mut buffer, message.len(), form))
    }

    fn refused(message: &[u8]) -> Malformed {
        decode(message, FORM, |request| {
            request.expect_err("it is to be refused")
        })
    }

    #[test]
    fn a_header_is_read_and_a_short_one_is_none() {
        let message = message(opcode::STATFS, &[]);
        let header = Header::decode(&message).unwrap();
        assert_eq!((header.unique, header.node), (Unique(5), Ino(7)));
        assert_eq!((header.uid, header.gid, header.pid), (1, 2, 3));
        assert_eq!(Header::decode(&message[..39]), None);
    }

    #[test]
    fn names_end_with_a_zero_and_have_no_slash() {
        let lookup = |name: &[u8]| message(opcode::LOOKUP, &[name]);
        decode(&lookup(b"name\0"), FORM, |request| {
            assert_eq!(request, Ok(Request::Lookup { name: b"name" }));
        });
        let operation = opcode::LOOKUP;
        assert_eq!(refused(&lookup(b"name")), Malformed::Short(operation));
        assert_eq!(refused(&lookup(b"")), Malformed::Short(operation));
        assert_eq!(refused(&lookup(b"\0")), Malformed::Name(operation));
        assert_eq!(refused(&lookup(b"a/b\0")), Malformed::Name(operation));
        let long = [&[b'a'; NAME_BYTES_MAX][..], b"\0"].concat();
        decode(&lookup(&long), FORM, |request| assert!(request.is_ok()));
        let longer = [&[b'a'; NAME_BYTES_MAX + 1][..], b"\0"].concat();
        assert_eq!(refused(&lookup(&longer)), Malformed::Name(operation));
    }

    #[test]
    fn two_names_follow_each_other_and_targets_may_have_slashes() {
        let symlink = message(opcode::SYMLINK, &[b"name\0../a/b\0"]);
        decode(&symlink, FORM, |request| {
            let (name, target) = (&b"name"[..], &b"../a/b"[..]);
            assert_eq!(request, Ok(Request::Symlink { name, target }));
        });
        let rename = abi::Rename2In {
            newdir: 9,
            flags: 2,
            padding: 0,
        };
        let rename = message(opcode::RENAME2, &[&rename.encode(), b"old\0new\0"]);
        decode(&rename, FORM, |request| {
            let expected = Request::Rename {
                name: b"old",
                new_dir: Ino(9),
                new_name: b"new",
                flags: 2,
            };
            assert_eq!(request, Ok(expected));
        });
        assert_eq!(
            refused(&message(opcode::RENAME, &[&[0; 8], b"old\0"])),
            Malformed::Short(opcode::RENAME)
        );
    }

    #[test]
    fn a_time_before_1970_keeps_its_fraction() {
        let set = abi::SetattrIn {
            valid: fattr::ATIME | fattr::MTIME | fattr::MTIME_NOW | fattr::CTIME | fattr::SIZE,
            atime: -1,
            atimensec: 500_000_000,
            ctime: i64::MIN,
            ctimensec: 999_999_999,
            size: 3,
            mode: 0o777,
            ..abi::SetattrIn::default()
        };
        let bytes = message(opcode::SETATTR, &[&set.encode()]);
        decode(&bytes, FORM, |request| {
            let expected = Setattr {
                atime: Some(SetTime::At(Time {
                    secs: -1,
                    nanos: 500_000_000,
                })),
                mtime: Some(SetTime::Now),
                ctime: Some(Time {
                    secs: i64::MIN,
                    nanos: 999_999_999,
                }),
                size: Some(3),
                ..Setattr::default()
            };
            assert_eq!(request, Ok(Request::Setattr(expected)));
        });
        let odd = abi::SetattrIn {
            atimensec: 1_000_000_000,
            ..set
        };
        assert_eq!(
            refused(&message(opcode::SETATTR, &[&odd.encode()])),
            Malformed::Value(opcode::SETATTR)
        );
    }

    #[test]
    fn read_has_room_for_all_its_bytes_or_is_refused_and_a_listing_takes_the_room_there_is() {
        let read_as = |operation, size| {
            let read = abi::ReadIn {
                fh: 4,
                offset: 1 << 40,
                size,
                ..abi::ReadIn::default()
            };
            message(operation, &[&read.encode()])
        };
        decode(&read_as(opcode::READ, 100), FORM, |request| {
            let Ok(Request::Read { fh, offset, room }) = request else {
                panic!("{request:?}")
            };
            assert_eq!((fh, offset, room.len()), (FileHandle(4), 1 << 40, 100));
        });
        decode(&read_as(opcode::READ, 4097), FORM, |request| {
            assert_eq!(request, Err(Malformed::Value(opcode::READ)));
        });
        decode(&read_as(opcode::READDIR, u32::MAX), FORM, |request| {
            assert!(matches!(request, Ok(Request::Readdir { room, .. }) if room.len() == 4096));
        });
    }

    #[test]
    fn data_is_as_long_as_the_structure_says_and_the_bytes_there_are() {
        let write = |size, data: &[u8]| {
            let write = abi::WriteIn {
                size,
                write_flags: abi::write::KILL_SUIDGID,
                ..abi::WriteIn::default()
            };
            message(opcode::WRITE, &[&write.encode(), data])
        };
        decode(&write(4, b"data"), FORM, |request| {
            assert!(matches!(request, Ok(Request::Write { data: b"data", .. })));
        });
        decode(&write(2, b"data"), FORM, |request| {
            assert!(matches!(request, Ok(Request::Write { data: b"da", .. })));
        });
        assert_eq!(refused(&write(5, b"data")), Malformed::Short(opcode::WRITE));
        assert_eq!(
            refused(&write(u32::MAX, b"")),
            Malformed::Short(opcode::WRITE)
        );
    }

    #[test]
    fn setxattr_has_the_structure_that_was_agreed_upon() {
        let short = abi::SetxattrCompatIn { size: 2, flags: 1 };
        let bytes = message(opcode::SETXATTR, &[&short.encode(), b"user.a/b\0vv"]);
        let expected = |extra_flags| Request::Setxattr {
            name: b"user.a/b",
            value: b"vv",
            flags: 1,
            extra_flags,
        };
        decode(&bytes, FORM, |request| assert_eq!(request, Ok(expected(0))));
        let long = abi::SetxattrIn {
            size: 2,
            flags: 1,
            setxattr_flags: 1,
            padding: 0,
        };
        let bytes = message(opcode::SETXATTR, &[&long.encode(), b"user.a/b\0vv"]);
        let form = Form {
            has_setxattr_ext: true,
        };
        decode(&bytes, form, |request| assert_eq!(request, Ok(expected(1))));
    }

    #[test]
    fn records_are_counted_by_the_bytes_there_are() {
        let forgets = |count, ones: &[(u64, u64)]| {
            let batch = abi::BatchForgetIn { count, padding: 0 };
            let ones = ones
                .iter()
                .map(|&(node, nlookup)| abi::ForgetOne { node, nlookup });
            let ones: Vec<_> = ones.flat_map(|one| one.encode()).collect();
            message(opcode::BATCH_FORGET, &[&batch.encode(), &ones])
        };
        decode(&forgets(2, &[(8, 1), (9, 3)]), FORM, |request| {
            let Ok(Request::BatchForget { forgets }) = request else {
                panic!("{request:?}")
            };
            let forgets: Vec<_> = forgets.forgets().collect();
            assert_eq!(forgets, [(Ino(8), 1), (Ino(9), 3)]);
        });
        let short = Malformed::Short(opcode::BATCH_FORGET);
        assert_eq!(refused(&forgets(3, &[(8, 1), (9, 3)])), short);
        assert_eq!(refused(&forgets(u32::MAX, &[(8, 1)])), short);
    }

    #[test]
    fn extensions_do_not_belong_to_the_payload() {
        let mut lookup = message(opcode::LOOKUP, &[b"name\0", &[0xff; 8]]);
        lookup[36] = 1;
        decode(&lookup, FORM, |request| {
            assert_eq!(request, Ok(Request::Lookup { name: b"name" }));
        });
        lookup[36] = 2;
        assert_eq!(refused(&lookup), Malformed::Short(opcode::LOOKUP));
    }

    #[test]
    fn a_ring_has_the_same_request_in_parts() {
        let mkdir = abi::MkdirIn {
            mode: 0o755,
            umask: 0o22,
        };
        let whole = message(opcode::MKDIR, &[&mkdir.encode(), b"dir\0"]);
        let header = Header::decode(&whole).unwrap();
        let mut structure = [0xaa; 128];
        structure[..8].copy_from_slice(&mkdir.encode());
        let mut payload = *b"dir\0old bytes";
        let request = Request::decode_parts(&header, &structure, &mut payload, 4, FORM);
        let expected = Request::Mkdir {
            name: b"dir",
            mode: 0o755,
            umask: 0o22,
        };
        assert_eq!(request, Ok(expected));
    }

    #[test]
    fn an_old_init_and_an_unknown_operation_decode() {
        let init = message(opcode::INIT, &[&[7, 0, 0, 0, 19, 0, 0, 0]]);
        decode(&init, FORM, |request| {
            let Ok(Request::Init(init)) = request else {
                panic!("{request:?}")
            };
            assert_eq!((init.major, init.minor, init.flags2), (7, 19, 0));
        });
        let unknown = message(4000, &[b"anything"]);
        decode(&unknown, FORM, |request| {
            assert_eq!(request, Ok(Request::Unknown))
        });
    }

    /// Every operation, cut at every byte: refused or decoded, and never a panic.
    #[test]
    fn requests_that_end_early_are_refused() {
        for operation in 0..=opcode::COPY_FILE_RANGE_64 + 1 {
            for form in [false, true].map(|has_setxattr_ext| Form { has_setxattr_ext }) {
                let known = abi::structure_bytes(operation, form.has_setxattr_ext);
                for bytes in 0..120 {
                    let message = message(operation, &[&vec![0; bytes]]);
                    let is_refused = decode(&message, form, |request| request.is_err());
                    assert!(is_refused || known.is_none_or(|known| bytes >= known));
                }
            }
        }
    }
}
