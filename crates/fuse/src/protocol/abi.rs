//! Structures, numbers and flags of the protocol between the kernel and a FUSE server, version
//! 7.45.
//!
//! The layout is the published one (`include/uapi/linux/fuse.h` of Linux 6.18). Each field stands
//! with its offset, and a structure that leaves a gap or has another size does not compile. Numbers
//! are in the byte order of the machine. Times are signed seconds and nanoseconds from 0 to
//! 999,999,999, so a time before 1970 with a fraction has a negative second and a positive
//! fraction.

/// A field of a structure, at a place among its bytes.
pub trait Field: Sized {
    /// Bytes that it takes.
    const BYTES: usize;

    /// Reads the field from the start of `bytes`.
    fn get(bytes: &[u8]) -> Self;

    /// Writes the field to the start of `bytes`.
    fn put(&self, bytes: &mut [u8]);
}

macro_rules! number_fields {
    ($($number:ty)*) => {$(
        impl Field for $number {
            const BYTES: usize = size_of::<$number>();

            fn get(bytes: &[u8]) -> Self {
                let bytes = bytes[..Self::BYTES].try_into();
                Self::from_ne_bytes(bytes.expect("as many as the number has"))
            }

            fn put(&self, bytes: &mut [u8]) {
                bytes[..Self::BYTES].copy_from_slice(&self.to_ne_bytes());
            }
        }
    )*};
}

number_fields!(u16 u32 u64 i32 i64);

impl<T: Field + Copy + Default, const N: usize> Field for [T; N] {
    const BYTES: usize = N * T::BYTES;

    fn get(bytes: &[u8]) -> Self {
        std::array::from_fn(|at| T::get(&bytes[at * T::BYTES..]))
    }

    fn put(&self, bytes: &mut [u8]) {
        for (at, one) in self.iter().enumerate() {
            one.put(&mut bytes[at * T::BYTES..]);
        }
    }
}

macro_rules! structures {
    ($(
        $(#[$about:meta])*
        $name:ident $bytes:literal {
            $($(#[$field_about:meta])* $at:literal $field:ident $type:ty,)*
        }
    )*) => {$(
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[allow(missing_docs, reason = "the names are the kernel's, and mean what they mean there")]
        pub struct $name {
            $($(#[$field_about])* pub $field: $type,)*
        }

        impl $name {
            /// Bytes of the structure.
            pub const BYTES: usize = $bytes;

            /// The structure in the order of the kernel.
            #[must_use]
            pub fn encode(&self) -> [u8; $bytes] {
                let mut bytes = [0; $bytes];
                self.put(&mut bytes);
                bytes
            }

            /// The structure at the start of `bytes`, or `None` if there are too few.
            #[must_use]
            pub fn decode(bytes: &[u8]) -> Option<Self> {
                bytes.first_chunk::<$bytes>().map(|bytes| Self::get(bytes))
            }
        }

        impl Field for $name {
            const BYTES: usize = $bytes;

            fn get(bytes: &[u8]) -> Self {
                Self { $($field: <$type>::get(&bytes[$at..]),)* }
            }

            fn put(&self, bytes: &mut [u8]) {
                $(self.$field.put(&mut bytes[$at..]);)*
            }
        }

        const _: () = {
            let mut end = 0;
            $(
                assert!(end == $at, "a gap before a field");
                end += <$type as Field>::BYTES;
            )*
            assert!(end == $bytes, "another size");
        };
    )*};
}

structures! {
    /// The start of each request.
    InHeader 40 {
        0 len u32,
        4 opcode u32,
        8 unique u64,
        16 node u64,
        24 uid u32,
        28 gid u32,
        32 pid u32,
        /// Length of the extensions at the end of the request, in units of 8 bytes.
        36 extensions u16,
        38 padding u16,
    }
    /// The start of each answer and each notification.
    OutHeader 16 {
        0 len u32,
        /// 0 or a negative errno in an answer; the kind in a notification.
        4 error i32,
        /// The request of this answer; 0 in a notification.
        8 unique u64,
    }
    InitIn 64 {
        0 major u32,
        4 minor u32,
        8 max_readahead u32,
        12 flags u32,
        16 flags2 u32,
        20 unused [u32; 11],
    }
    InitOut 64 {
        0 major u32,
        4 minor u32,
        8 max_readahead u32,
        12 flags u32,
        16 max_background u16,
        18 congestion_threshold u16,
        20 max_write u32,
        /// Granularity of times, in nanoseconds.
        24 time_gran u32,
        28 max_pages u16,
        30 map_alignment u16,
        32 flags2 u32,
        36 max_stack_depth u32,
        /// After so many seconds without an answer the kernel ends the connection; 0 for never.
        40 request_timeout u16,
        42 unused [u16; 11],
    }
    Attr 88 {
        0 ino u64,
        8 size u64,
        16 blocks u64,
        24 atime i64,
        32 mtime i64,
        40 ctime i64,
        48 atimensec u32,
        52 mtimensec u32,
        56 ctimensec u32,
        60 mode u32,
        64 nlink u32,
        68 uid u32,
        72 gid u32,
        76 rdev u32,
        80 blksize u32,
        84 flags u32,
    }
    EntryOut 128 {
        /// 0 for a name that does not exist.
        0 node u64,
        8 generation u64,
        16 entry_valid u64,
        24 attr_valid u64,
        32 entry_valid_nsec u32,
        36 attr_valid_nsec u32,
        40 attr Attr,
    }
    AttrOut 104 {
        0 attr_valid u64,
        8 attr_valid_nsec u32,
        12 padding u32,
        16 attr Attr,
    }
    /// A time of statx(2).
    SxTime 16 {
        0 sec i64,
        8 nsec u32,
        12 reserved i32,
    }
    Statx 256 {
        0 mask u32,
        4 blksize u32,
        8 attributes u64,
        16 nlink u32,
        20 uid u32,
        24 gid u32,
        28 mode u16,
        30 padding u16,
        32 ino u64,
        40 size u64,
        48 blocks u64,
        56 attributes_mask u64,
        64 atime SxTime,
        80 btime SxTime,
        96 ctime SxTime,
        112 mtime SxTime,
        128 rdev_major u32,
        132 rdev_minor u32,
        136 dev_major u32,
        140 dev_minor u32,
        144 unused [u64; 14],
    }
    StatxOut 288 {
        0 attr_valid u64,
        8 attr_valid_nsec u32,
        12 flags u32,
        16 unused [u64; 2],
        32 stat Statx,
    }
    OpenOut 16 {
        0 fh u64,
        8 open_flags u32,
        12 backing_id i32,
    }
    WriteOut 8 {
        0 size u32,
        4 padding u32,
    }
    StatfsOut 80 {
        0 blocks u64,
        8 bfree u64,
        16 bavail u64,
        24 files u64,
        32 ffree u64,
        40 bsize u32,
        44 namelen u32,
        48 frsize u32,
        52 padding u32,
        56 unused [u32; 6],
    }
    GetxattrOut 8 {
        0 size u32,
        4 padding u32,
    }
    FileLock 24 {
        0 start u64,
        8 end u64,
        16 kind u32,
        20 pid u32,
    }
    LkOut 24 {
        0 lk FileLock,
    }
    BmapOut 8 {
        0 block u64,
    }
    IoctlOut 16 {
        0 result i32,
        4 flags u32,
        8 in_iovs u32,
        12 out_iovs u32,
    }
    PollOut 8 {
        0 revents u32,
        4 padding u32,
    }
    LseekOut 8 {
        0 offset u64,
    }
    CopyFileRangeOut 8 {
        0 bytes_copied u64,
    }
    /// The part before the name of an entry in the answer to READDIR.
    Dirent 24 {
        0 ino u64,
        8 off u64,
        16 namelen u32,
        20 kind u32,
    }
    /// The part before the name of an entry in the answer to READDIRPLUS.
    Direntplus 152 {
        0 entry EntryOut,
        128 dirent Dirent,
    }
    ForgetIn 8 {
        0 nlookup u64,
    }
    BatchForgetIn 8 {
        0 count u32,
        4 padding u32,
    }
    ForgetOne 16 {
        0 node u64,
        8 nlookup u64,
    }
    GetattrIn 16 {
        0 flags u32,
        4 padding u32,
        8 fh u64,
    }
    SetattrIn 88 {
        0 valid u32,
        4 padding u32,
        8 fh u64,
        16 size u64,
        24 lock_owner u64,
        32 atime i64,
        40 mtime i64,
        48 ctime i64,
        56 atimensec u32,
        60 mtimensec u32,
        64 ctimensec u32,
        68 mode u32,
        72 unused4 u32,
        76 uid u32,
        80 gid u32,
        84 unused5 u32,
    }
    MknodIn 16 {
        0 mode u32,
        4 rdev u32,
        8 umask u32,
        12 padding u32,
    }
    MkdirIn 8 {
        0 mode u32,
        4 umask u32,
    }
    RenameIn 8 {
        0 newdir u64,
    }
    Rename2In 16 {
        0 newdir u64,
        8 flags u32,
        12 padding u32,
    }
    LinkIn 8 {
        0 oldnode u64,
    }
    OpenIn 8 {
        0 flags u32,
        4 open_flags u32,
    }
    CreateIn 16 {
        0 flags u32,
        4 mode u32,
        8 umask u32,
        12 open_flags u32,
    }
    /// READ, READDIR and READDIRPLUS.
    ReadIn 40 {
        0 fh u64,
        8 offset u64,
        16 size u32,
        20 read_flags u32,
        24 lock_owner u64,
        32 flags u32,
        36 padding u32,
    }
    WriteIn 40 {
        0 fh u64,
        8 offset u64,
        16 size u32,
        20 write_flags u32,
        24 lock_owner u64,
        32 flags u32,
        36 padding u32,
    }
    ReleaseIn 24 {
        0 fh u64,
        8 flags u32,
        12 release_flags u32,
        16 lock_owner u64,
    }
    FlushIn 24 {
        0 fh u64,
        8 unused u32,
        12 padding u32,
        16 lock_owner u64,
    }
    FsyncIn 16 {
        0 fh u64,
        8 fsync_flags u32,
        12 padding u32,
    }
    /// Without SETXATTR_EXT.
    SetxattrCompatIn 8 {
        0 size u32,
        4 flags u32,
    }
    /// With SETXATTR_EXT.
    SetxattrIn 16 {
        0 size u32,
        4 flags u32,
        8 setxattr_flags u32,
        12 padding u32,
    }
    /// GETXATTR and LISTXATTR.
    GetxattrIn 8 {
        0 size u32,
        4 padding u32,
    }
    LkIn 48 {
        0 fh u64,
        8 owner u64,
        16 lk FileLock,
        40 lk_flags u32,
        44 padding u32,
    }
    AccessIn 8 {
        0 mask u32,
        4 padding u32,
    }
    InterruptIn 8 {
        0 unique u64,
    }
    BmapIn 16 {
        0 block u64,
        8 blocksize u32,
        12 padding u32,
    }
    IoctlIn 32 {
        0 fh u64,
        8 flags u32,
        12 cmd u32,
        16 arg u64,
        24 in_size u32,
        28 out_size u32,
    }
    PollIn 24 {
        0 fh u64,
        8 kh u64,
        16 flags u32,
        20 events u32,
    }
    FallocateIn 32 {
        0 fh u64,
        8 offset u64,
        16 length u64,
        24 mode u32,
        28 padding u32,
    }
    LseekIn 24 {
        0 fh u64,
        8 offset u64,
        16 whence u32,
        20 padding u32,
    }
    /// COPY_FILE_RANGE and COPY_FILE_RANGE_64.
    CopyFileRangeIn 56 {
        0 fh_in u64,
        8 off_in u64,
        16 node_out u64,
        24 fh_out u64,
        32 off_out u64,
        40 len u64,
        48 flags u64,
    }
    SetupmappingIn 40 {
        0 fh u64,
        8 foffset u64,
        16 len u64,
        24 flags u64,
        32 moffset u64,
    }
    RemovemappingIn 4 {
        0 count u32,
    }
    RemovemappingOne 16 {
        0 moffset u64,
        8 len u64,
    }
    SyncfsIn 8 {
        0 padding u64,
    }
    StatxIn 24 {
        0 getattr_flags u32,
        4 reserved u32,
        8 fh u64,
        16 sx_flags u32,
        20 sx_mask u32,
    }
    NotifyRetrieveIn 40 {
        0 unused1 u64,
        8 offset u64,
        16 size u32,
        20 unused2 u32,
        24 unused3 u64,
        32 unused4 u64,
    }
    InvalInodeOut 24 {
        0 ino u64,
        /// A negative offset spares the pages.
        8 off i64,
        16 len i64,
    }
    InvalEntryOut 16 {
        0 parent u64,
        8 namelen u32,
        12 flags u32,
    }
    DeleteOut 24 {
        0 parent u64,
        8 child u64,
        16 namelen u32,
        20 padding u32,
    }
    StoreOut 24 {
        0 node u64,
        8 offset u64,
        16 size u32,
        20 padding u32,
    }
    RetrieveOut 32 {
        0 notify_unique u64,
        8 node u64,
        16 offset u64,
        24 size u32,
        28 padding u32,
    }
    /// The part before `count` node ids.
    PruneOut 16 {
        0 count u32,
        4 padding u32,
        8 unused u64,
    }
}

macro_rules! numbers {
    ($($(#[$about:meta])* $module:ident $type:ty { $($name:ident = $value:expr,)* })*) => {$(
        $(#[$about])*
        #[allow(missing_docs, reason = "the names are the kernel's, and mean what they mean there")]
        pub mod $module {
            $(pub const $name: $type = $value;)*
        }
    )*};
}

numbers! {
    /// Operations, the kinds of requests.
    opcode u32 {
        LOOKUP = 1,
        FORGET = 2,
        GETATTR = 3,
        SETATTR = 4,
        READLINK = 5,
        SYMLINK = 6,
        MKNOD = 8,
        MKDIR = 9,
        UNLINK = 10,
        RMDIR = 11,
        RENAME = 12,
        LINK = 13,
        OPEN = 14,
        READ = 15,
        WRITE = 16,
        STATFS = 17,
        RELEASE = 18,
        FSYNC = 20,
        SETXATTR = 21,
        GETXATTR = 22,
        LISTXATTR = 23,
        REMOVEXATTR = 24,
        FLUSH = 25,
        INIT = 26,
        OPENDIR = 27,
        READDIR = 28,
        RELEASEDIR = 29,
        FSYNCDIR = 30,
        GETLK = 31,
        SETLK = 32,
        SETLKW = 33,
        ACCESS = 34,
        CREATE = 35,
        INTERRUPT = 36,
        BMAP = 37,
        DESTROY = 38,
        IOCTL = 39,
        POLL = 40,
        NOTIFY_REPLY = 41,
        BATCH_FORGET = 42,
        FALLOCATE = 43,
        READDIRPLUS = 44,
        RENAME2 = 45,
        LSEEK = 46,
        COPY_FILE_RANGE = 47,
        SETUPMAPPING = 48,
        REMOVEMAPPING = 49,
        SYNCFS = 50,
        TMPFILE = 51,
        STATX = 52,
        COPY_FILE_RANGE_64 = 53,
    }
    /// Kinds of notifications.
    notify i32 {
        INVAL_INODE = 2,
        INVAL_ENTRY = 3,
        STORE = 4,
        RETRIEVE = 5,
        DELETE = 6,
        RESEND = 7,
        INC_EPOCH = 8,
        PRUNE = 9,
    }
    /// Capabilities that kernel and server agree upon with INIT.
    init u64 {
        ASYNC_READ = 1 << 0,
        POSIX_LOCKS = 1 << 1,
        ATOMIC_O_TRUNC = 1 << 3,
        EXPORT_SUPPORT = 1 << 4,
        BIG_WRITES = 1 << 5,
        DONT_MASK = 1 << 6,
        FLOCK_LOCKS = 1 << 10,
        HAS_IOCTL_DIR = 1 << 11,
        AUTO_INVAL_DATA = 1 << 12,
        DO_READDIRPLUS = 1 << 13,
        READDIRPLUS_AUTO = 1 << 14,
        ASYNC_DIO = 1 << 15,
        WRITEBACK_CACHE = 1 << 16,
        NO_OPEN_SUPPORT = 1 << 17,
        PARALLEL_DIROPS = 1 << 18,
        HANDLE_KILLPRIV = 1 << 19,
        POSIX_ACL = 1 << 20,
        ABORT_ERROR = 1 << 21,
        MAX_PAGES = 1 << 22,
        CACHE_SYMLINKS = 1 << 23,
        NO_OPENDIR_SUPPORT = 1 << 24,
        EXPLICIT_INVAL_DATA = 1 << 25,
        MAP_ALIGNMENT = 1 << 26,
        SUBMOUNTS = 1 << 27,
        HANDLE_KILLPRIV_V2 = 1 << 28,
        SETXATTR_EXT = 1 << 29,
        INIT_EXT = 1 << 30,
        SECURITY_CTX = 1 << 32,
        HAS_INODE_DAX = 1 << 33,
        CREATE_SUPP_GROUP = 1 << 34,
        HAS_EXPIRE_ONLY = 1 << 35,
        DIRECT_IO_ALLOW_MMAP = 1 << 36,
        PASSTHROUGH = 1 << 37,
        NO_EXPORT_SUPPORT = 1 << 38,
        HAS_RESEND = 1 << 39,
        ALLOW_IDMAP = 1 << 40,
        OVER_IO_URING = 1 << 41,
        REQUEST_TIMEOUT = 1 << 42,
    }
    /// Flags of an open file, in the answer to OPEN and CREATE.
    fopen u32 {
        DIRECT_IO = 1 << 0,
        KEEP_CACHE = 1 << 1,
        NONSEEKABLE = 1 << 2,
        CACHE_DIR = 1 << 3,
        STREAM = 1 << 4,
        NOFLUSH = 1 << 5,
        PARALLEL_DIRECT_WRITES = 1 << 6,
        PASSTHROUGH = 1 << 7,
    }
    /// Fields of a SETATTR that count.
    fattr u32 {
        MODE = 1 << 0,
        UID = 1 << 1,
        GID = 1 << 2,
        SIZE = 1 << 3,
        ATIME = 1 << 4,
        MTIME = 1 << 5,
        FH = 1 << 6,
        ATIME_NOW = 1 << 7,
        MTIME_NOW = 1 << 8,
        LOCKOWNER = 1 << 9,
        CTIME = 1 << 10,
        KILL_SUIDGID = 1 << 11,
    }
    /// Flags of a WRITE.
    write u32 {
        CACHE = 1 << 0,
        LOCKOWNER = 1 << 1,
        KILL_SUIDGID = 1 << 2,
    }
    /// GETATTR and STATX.
    getattr u32 {
        FH = 1 << 0,
    }
    /// FSYNC and FSYNCDIR.
    fsync u32 {
        FDATASYNC = 1 << 0,
    }
    /// SETXATTR.
    setxattr u32 {
        ACL_KILL_SGID = 1 << 0,
    }
    /// Fields of a STATX that count.
    statx u32 {
        BASIC_STATS = 0x7ff,
        BTIME = 0x800,
    }
}

/// The flag `O_DSYNC` of open(2), which `O_SYNC` contains, on all machines but Alpha, MIPS, PA-RISC
/// and SPARC. (In `rustix` 1 the flag of this name is the whole `O_SYNC`.)
pub const O_DSYNC: u32 = 1 << 12;

/// The version that this server speaks.
pub const VERSION: (u32, u32) = (7, 45);

/// Alignment of names, entries of directories and extensions, in bytes.
pub const ALIGN_BYTES: usize = 8;

/// Bytes of the structure that a request begins with behind the header; `None` for an operation
/// that is not known. A SETXATTR has a longer one when SETXATTR_EXT was agreed upon.
#[must_use]
pub fn structure_bytes(operation: u32, has_setxattr_ext: bool) -> Option<usize> {
    Some(match operation {
        opcode::LOOKUP
        | opcode::READLINK
        | opcode::SYMLINK
        | opcode::UNLINK
        | opcode::RMDIR
        | opcode::STATFS
        | opcode::REMOVEXATTR
        | opcode::DESTROY => 0,
        opcode::FORGET => ForgetIn::BYTES,
        opcode::GETATTR => GetattrIn::BYTES,
        opcode::SETATTR => SetattrIn::BYTES,
        opcode::MKNOD => MknodIn::BYTES,
        opcode::MKDIR => MkdirIn::BYTES,
        opcode::RENAME => RenameIn::BYTES,
        opcode::LINK => LinkIn::BYTES,
        opcode::OPEN | opcode::OPENDIR => OpenIn::BYTES,
        opcode::READ | opcode::READDIR | opcode::READDIRPLUS => ReadIn::BYTES,
        opcode::WRITE => WriteIn::BYTES,
        opcode::RELEASE | opcode::RELEASEDIR => ReleaseIn::BYTES,
        opcode::FSYNC | opcode::FSYNCDIR => FsyncIn::BYTES,
        opcode::SETXATTR if has_setxattr_ext => SetxattrIn::BYTES,
        opcode::SETXATTR => SetxattrCompatIn::BYTES,
        opcode::GETXATTR | opcode::LISTXATTR => GetxattrIn::BYTES,
        opcode::FLUSH => FlushIn::BYTES,
        // An INIT of an older kernel is shorter than the structure.
        opcode::INIT => 0,
        opcode::GETLK | opcode::SETLK | opcode::SETLKW => LkIn::BYTES,
        opcode::ACCESS => AccessIn::BYTES,
        opcode::CREATE | opcode::TMPFILE => CreateIn::BYTES,
        opcode::INTERRUPT => InterruptIn::BYTES,
        opcode::BMAP => BmapIn::BYTES,
        opcode::IOCTL => IoctlIn::BYTES,
        opcode::POLL => PollIn::BYTES,
        opcode::NOTIFY_REPLY => NotifyRetrieveIn::BYTES,
        opcode::BATCH_FORGET => BatchForgetIn::BYTES,
        opcode::FALLOCATE => FallocateIn::BYTES,
        opcode::RENAME2 => Rename2In::BYTES,
        opcode::LSEEK => LseekIn::BYTES,
        opcode::COPY_FILE_RANGE | opcode::COPY_FILE_RANGE_64 => CopyFileRangeIn::BYTES,
        opcode::SETUPMAPPING => SetupmappingIn::BYTES,
        opcode::REMOVEMAPPING => RemovemappingIn::BYTES,
        opcode::SYNCFS => SyncfsIn::BYTES,
        opcode::STATX => StatxIn::BYTES,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_structure_survives_its_bytes() {
        let out = InitOut {
            major: 7,
            minor: 45,
            max_background: 0x1234,
            max_write: 1 << 20,
            max_pages: 256,
            flags2: 0xa5,
            request_timeout: 9,
            ..InitOut::default()
        };
        let bytes = out.encode();
        assert_eq!(
            &bytes[..8],
            [7_u32.to_ne_bytes(), 45_u32.to_ne_bytes()].concat()
        );
        assert_eq!(bytes[16..18], 0x1234_u16.to_ne_bytes());
        assert_eq!(bytes[32..36], 0xa5_u32.to_ne_bytes());
        assert_eq!(bytes[40..42], 9_u16.to_ne_bytes());
        assert_eq!(InitOut::decode(&bytes), Some(out));
        assert_eq!(InitOut::decode(&bytes[..63]), None);
    }

    #[test]
    fn structures_in_structures_lie_at_their_offsets() {
        let entry = Direntplus {
            entry: EntryOut {
                attr: Attr {
                    atime: -2,
                    mode: 0o644,
                    ..Attr::default()
                },
                ..EntryOut::default()
            },
            dirent: Dirent {
                namelen: 5,
                ..Dirent::default()
            },
        };
        let bytes = entry.encode();
        assert_eq!(bytes[64..72], (-2_i64).to_ne_bytes());
        assert_eq!(bytes[100..104], 0o644_u32.to_ne_bytes());
        assert_eq!(bytes[144..148], 5_u32.to_ne_bytes());
        assert_eq!(Direntplus::decode(&bytes), Some(entry));
    }

    /// Structures that an older installed header lacks are not compared.
    #[test]
    fn sizes_are_those_of_the_installed_header() {
        let source = "/usr/include/linux/fuse.h";
        let Ok(text) = std::fs::read_to_string(source) else {
            return;
        };
        let bytes = |name: &str| bytes_of_c_structure(&text, name);
        let ours: &[(&str, usize)] = &[
            ("fuse_in_header", InHeader::BYTES),
            ("fuse_out_header", OutHeader::BYTES),
            ("fuse_init_in", InitIn::BYTES),
            ("fuse_init_out", InitOut::BYTES),
            ("fuse_attr", Attr::BYTES),
            ("fuse_setattr_in", SetattrIn::BYTES),
            ("fuse_open_out", OpenOut::BYTES),
            ("fuse_kstatfs", StatfsOut::BYTES),
            ("fuse_read_in", ReadIn::BYTES),
            ("fuse_write_in", WriteIn::BYTES),
            ("fuse_release_in", ReleaseIn::BYTES),
            ("fuse_flush_in", FlushIn::BYTES),
            ("fuse_fsync_in", FsyncIn::BYTES),
            ("fuse_setxattr_in", SetxattrIn::BYTES),
            ("fuse_file_lock", FileLock::BYTES),
            ("fuse_bmap_in", BmapIn::BYTES),
            ("fuse_ioctl_in", IoctlIn::BYTES),
            ("fuse_ioctl_out", IoctlOut::BYTES),
            ("fuse_poll_in", PollIn::BYTES),
            ("fuse_fallocate_in", FallocateIn::BYTES),
            ("fuse_lseek_in", LseekIn::BYTES),
            ("fuse_copy_file_range_in", CopyFileRangeIn::BYTES),
            ("fuse_setupmapping_in", SetupmappingIn::BYTES),
            ("fuse_notify_inval_inode_out", InvalInodeOut::BYTES),
            ("fuse_notify_inval_entry_out", InvalEntryOut::BYTES),
            ("fuse_notify_delete_out", DeleteOut::BYTES),
            ("fuse_notify_store_out", StoreOut::BYTES),
            ("fuse_notify_retrieve_out", RetrieveOut::BYTES),
            ("fuse_notify_retrieve_in", NotifyRetrieveIn::BYTES),
        ];
        for (name, expected) in ours {
            assert_eq!(bytes(name), Some(*expected), "{name}");
        }
    }

    /// Bytes of a structure whose fields are all numbers, without gaps.
    fn bytes_of_c_structure(text: &str, name: &str) -> Option<usize> {
        let body = text.split_once(&format!("struct {name} {{"))?.1;
        let body = body.split_once("};")?.0;
        let mut bytes = 0;
        for line in body.lines().map(str::trim) {
            let Some((kind, field)) = line.split_once(char::is_whitespace) else {
                continue;
            };
            let width = match kind {
                "uint64_t" | "int64_t" => 8,
                "uint32_t" | "int32_t" => 4,
                "uint16_t" => 2,
                _ => continue,
            };
            let count = field
                .split_once('[')
                .and_then(|(_, count)| count.split_once(']'));
            bytes += width * count.map_or(1, |(count, _)| count.parse().unwrap());
        }
        Some(bytes)
    }
}
