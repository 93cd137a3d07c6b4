//! The command line, as the user types it.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use ramet_block::{Codec, Label, MetadataCopies, Uuid};

use crate::home;
use crate::size::Size;

/// A file system with instant clones of files and whole trees of any size
///
/// Ramet keeps files in a volume: an image file or a block device. A process in user space serves a
/// mounted volume through FUSE. A clone of a file or a directory tree is a writable copy. It takes
/// space only for the changes on either side, and costs the same for ten files and for ten million.
#[derive(Debug, Parser)]
#[command(name = "ramet", version)]
pub struct Ramet {
    #[command(subcommand)]
    pub verb: Verb,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Make a volume of one's own and mount it at ~/ramet, without root
    ///
    /// The volume is a sparse image in the user's data folder ($XDG_DATA_HOME, or ~/.local/share).
    /// Its size is the smaller of 64 GiB and three quarters of the free space below it. The image takes
    /// space as files come, and `ramet grow` makes it larger. A volume that is there already is mounted as
    /// it is. Commands without a volume or directory mean this one afterwards, but those that remove
    /// or overwrite.
    Init(Init),
    /// Make an empty volume in an image file or on a block device
    ///
    /// An image file is created sparse, with the size of --size and with mode 0600. A block device
    /// is used as a whole. The command refuses a file or device that holds data unless --force is
    /// given. The user of the command owns the root directory of the volume.
    Mkfs(Mkfs),
    /// Mount a volume on a directory
    ///
    /// The command starts a daemon that serves the volume, and returns once the mount is usable.
    /// A mount of an ordinary user serves only that user, unless allow_other is given. A mount of root
    /// serves all users, as far as the modes of files allow. A volume that was not unmounted in order is
    /// first recovered from its journal.
    Mount(Mount),
    /// Unmount a volume
    ///
    /// The command returns once everything is durable and the daemon has ended. It refuses while
    /// the volume is mounted on a second directory too (mount --bind). It also removes the mount of
    /// a daemon that has died. umount(8) with the options -l and -f detaches a mount in use and
    /// ends one that hangs; umount.ramet(8) tells of them.
    Umount(Umount),
    /// Clone a file or a directory tree, in constant time
    ///
    /// DST becomes a copy of SRC, at once and as a whole. Both must be on the same mount. The
    /// caller must be allowed to make DST, and must own SRC. An object at DST is a refusal, unless
    /// --replace is given. Afterwards the two are independent: either can be written, moved, cloned
    /// again or removed.
    Clone(Clone),
    /// Clone a directory tree, and remember its origin
    ///
    /// A fork is a clone with a base: the state that it began with is kept, so that `ramet reset` can
    /// go back to it and `ramet forks` can count the changes. Making one takes constant time, but for the
    /// index of a git tree, which gets the inode numbers of the fork. The base takes space only for
    /// changes of both sides. The command prints the path of each fork.
    Fork(Fork),
    /// Tell the forks: their origin, age, space, changes and users
    ///
    /// Each fork is listed below the tree that it was made of. The command tells the forks that the caller
    /// could find by its own permissions. Space, changes and users are told of forks that the caller owns.
    Forks(Forks),
    /// Remove forks with everything in them and their bases, each in constant time
    ///
    /// The command refuses trees that are no forks, and without --force forks that a process uses.
    Drop(Drop),
    /// Bring a fork back to the state that it began with
    ///
    /// A clone of the base takes the place of the fork, atomically. The command refuses a fork that a
    /// process uses, unless --force is given.
    Reset(Reset),
    /// Make a fork a new one of its source, with its changes
    ///
    /// A new fork of the source as it is today gets the changes of the fork by a merge, and takes its
    /// place by one rename. Names that git ignores are merged as all others: directories of them that
    /// the fork changed come as a whole. Commits of the fork are in refs/forks/NAME/*, with NAME as
    /// the last name of its path; HEAD and index are those of the source. The fork as it was stays,
    /// with the name FORK.refresh-K, until it is dropped. After conflicts nothing is changed, and the
    /// exit status is 1; after another failure it is 2. The command refuses a fork that a process
    /// uses, unless --force is given.
    Refresh(Refresh),
    /// Bring the changes of a fork into the directory that it was made of
    ///
    /// Both sides are compared with the base of the fork. Names that only one side changed are taken
    /// from it, and texts that both changed are merged by lines. All of it is one atomic step, in
    /// place: programs that work in the directory stay in it. The fork is kept, also when all of it was
    /// merged. After conflicts nothing is changed, and the exit status is 1; after another failure it
    /// is 2.
    ///
    /// In a git tree, names that git ignores are left alone. The commits of the fork are fetched as
    /// refs/forks/NAME/*, with NAME as the last name of the fork's path; HEAD and index stay.
    Merge(Merge),
    /// Run a command in a fork that stands at the path of its source
    ///
    /// The command sees a new fork of SRC wherever it would see SRC, so absolute paths in it hold. No
    /// other process does, and SRC stays as it is meanwhile. The command starts in the current
    /// directory if that lies in SRC, and at the top of SRC otherwise.
    ///
    /// Afterwards the differences are told on standard error, and the fork is committed, kept or
    /// discarded. By default the user is asked on a terminal, and without one the fork is kept. On a
    /// terminal a fork without a change is dropped and nobody asked, also with --ask. To commit is to
    /// merge, as `ramet merge` does, and then to drop the fork if nothing of it is left behind. After a
    /// failed command --commit commits nothing by itself: the user is asked on a terminal, and without
    /// one the fork is kept.
    ///
    /// The exit status is that of the command; for a command that a signal ended, 128 plus the number
    /// of the signal. It is 125 if ramet fails or a commit has conflicts, 126 if the command cannot be
    /// run, 127 if it is not found, and 2 for a wrong command line.
    Try(Try),
    /// Run a shell, or a command, in a fork that stands at the path of its source
    ///
    /// The shell is $SHELL. It sees the fork wherever it would see the directory that the fork was made
    /// of. If that is gone, the fork stands at its own path. The fork stays afterwards. The working
    /// directory is as with `ramet try`.
    ///
    /// The exit status is that of the shell or command; for one that a signal ended, 128 plus the number
    /// of the signal. It is 125 if ramet fails, 126 if the command cannot be run, 127 if it is not
    /// found, and 2 for a wrong command line.
    Enter(Enter),
    /// Exchange two files or directory trees, atomically
    ///
    /// Each of the two has the other's name afterwards. They may be of different kinds. Programs that
    /// have one of them open, or work in it, keep it.
    Swap(Swap),
    /// Move or rename files and directory trees
    ///
    /// On one mount this is a rename, of which no program ever sees a part. A source on another file
    /// system is copied and then removed, and the command says so. An object with the new name is a
    /// refusal, unless --replace is given; a directory is one too, without a slash at its end. The
    /// command goes on after a source that cannot be moved, and the exit status is 1 then. It is 2 for
    /// a wrong command line.
    Mv(Transfer),
    /// Copy files and directory trees: by clones, where source and copy are on one mount
    ///
    /// A clone takes constant time. A source on another file system is copied as `ramet import` and
    /// `cp -a` do, and the command says so. An object with the name of the copy is a refusal, unless
    /// --replace is given; a directory is one too, without a slash at its end. The command goes on
    /// after a source that cannot be copied, and the exit status is 1 then. It is 2 for a wrong command
    /// line.
    Cp(Copy),
    /// Remove files and whole directory trees, each in constant time
    ///
    /// The caller must be allowed to remove each path, and must own a directory. The space comes back in
    /// the background.
    Rm(Rm),
    /// Make everything written so far durable
    ///
    /// All data and all names of the volume are on the device when the command returns. sync(2)
    /// does not do this, because the request does not reach a FUSE file system.
    Sync(Sync),
    /// Check an unmounted volume
    ///
    /// The check looks at the state that the next mount would find, after recovery from the
    /// journal. Nothing on the volume changes unless --repair or --rebuild is given. The exit status is
    /// that of fsck(8): 0 without errors, 1 if all were corrected, 4 if some are left, 8 if the check
    /// failed, 16 for a wrong command line.
    Fsck(Fsck),
    /// Read everything on a mounted volume again, and repair it from copies where there are any
    ///
    /// Every checksum is verified. The command names every file that damage harms. It leaves half
    /// of the device's time to other programs, and can be ended at any time. Root and the user of
    /// the mount may scrub. The exit status is that of fsck(8): 0 without damage, 1 if all was
    /// repaired, 4 if some is left, 8 if the scrub failed, 16 for a wrong command line.
    Scrub(Scrub),
    /// Make a volume larger, mounted or not
    ///
    /// An image file grows with its volume. A volume never becomes smaller. Root and the user of the
    /// mount may let a mounted one grow.
    Grow(Grow),
    /// Show the counters of a volume and of its daemon
    ///
    /// The counters tell of space, nodes, journal, cache and requests of the kernel. A volume that
    /// is not mounted is shown as the next mount would find it.
    Stat(Stat),
    /// Make, list and remove snapshots of the whole volume
    ///
    /// A snapshot holds all files of the volume as of one moment, and never changes. It takes no
    /// time, and space only for later changes. `DIR/.ramet/snapshots/NAME` shows one of a mounted
    /// volume, and `mount -o ro,snapshot=NAME` mounts one, of a mounted volume too. Root and the user of
    /// the mount may make and remove snapshots.
    Snapshot(Snapshot),
    /// Tell the snapshots in which a file or directory tree changed
    ///
    /// Each line has a snapshot that first shows the object in a new state, and how that differs
    /// from the snapshot before: added, removed, type, content, metadata. The cost follows the
    /// changes, not the size of the tree. A path that was never there has no lines, and the exit
    /// status is 0. Root and the user of the mount may ask.
    Log(Log),
    /// Clone a file or directory tree out of a snapshot, in constant time
    ///
    /// The object comes back to its own path, or to DST, as it was in the snapshot. An object that is
    /// there is a refusal, unless --replace is given. Root and the user of the mount may ask for it.
    Restore(Restore),
    /// Compare two directory trees of a mount
    ///
    /// The comparison takes time for the differences, not for the size of the trees. Each line
    /// names an entry that was added or removed, or whose type, content or metadata differs. An
    /// added or removed directory stands for everything in it. The exit status is that of diff(1):
    /// 0 for equal trees, 1 for different ones, 2 for a failure. Root and the user of the mount may
    /// compare.
    Diff(Diff),
    /// Show the space of a directory tree
    ///
    /// Logical bytes are those that can be read: contents, names and attributes of all files, each
    /// clone counted in full, before compression, right to two percent. Shared bytes are also used
    /// by other trees, mostly clones. Exclusive bytes come back when the tree is removed.
    Du(Du),
    /// Bring a directory tree or a tar archive into a volume, fast and as a whole
    ///
    /// DST becomes a copy of SRC with everything that `cp -a` keeps: owners (as far as the caller may
    /// give files away), modes, times, extended attributes, access control lists, hard links, holes.
    /// DST appears once all of it is there, and is durable when the command returns. A command that
    /// is ended before leaves nothing. Objects that cannot be read, or that change while they are
    /// read, are told, and the exit status is 1.
    Import(Import),
    /// Write a directory tree to standard output as a tar archive
    ///
    /// The archive is in the PAX format, with extended attributes and hard links, sorted by name.
    /// Objects that cannot be read, that change while they are read, or that no archive takes, as
    /// sockets, are told on standard error, and the exit status is 1; so it is after a failure that
    /// ends the archive early. It is 2 for a wrong command line.
    Export(Export),
    /// Write directory trees to standard output as a stream for `ramet receive`
    ///
    /// All trees are sent as of one moment, with everything that a clone keeps. Trees and files that
    /// are clones of each other are sent once, and share again where they are received. With --from,
    /// the stream has only the differences from a snapshot that was sent before. Root and the user
    /// of the mount may send.
    Send(Send),
    /// Make directory trees of a stream of `ramet send` on standard input
    ///
    /// Each tree appears in DIR under the name that it was sent with, once the whole stream is there,
    /// and is durable when the command returns. After a command that was ended before, the same
    /// stream goes on where it was. The trees are forks without an origin: `ramet forks` tells their
    /// changes since.
    Receive(Receive),
    /// Measure Ramet beside other file systems
    ///
    /// The command runs ramet-bench, a program of its own, with the same arguments.
    #[command(disable_help_flag = true)]
    Bench(Bench),
}

#[derive(Debug, Args)]
pub struct Mkfs {
    /// Size of the volume in bytes, or with one of the suffixes K, M, G and T, which are powers of
    /// 1,024: 20G, 1.5T. The least size is 4M. A size is rounded up to a multiple of 4,096. A new
    /// image file requires it, an existing one keeps its own without it, and a block device, which
    /// is used whole, refuses it
    #[arg(long, value_name = "N")]
    pub size: Option<Size>,
    /// Make the volume even if the file or device holds data, which is lost
    #[arg(long, short = 'f', short_alias = 'F')]
    pub force: bool,
    /// Tell the size of the new volume and change nothing
    #[arg(long, short = 'n')]
    pub dry_run: bool,
    /// Print nothing but errors
    #[arg(long, short)]
    pub quiet: bool,
    /// Name of the volume, for people: up to 64 bytes of UTF-8, without control characters. No
    /// command changes the name of a volume later
    #[arg(short = 'L', long, value_name = "LABEL")]
    pub label: Option<Label>,
    /// UUID of the volume. Default: a random one. No command changes the UUID of a volume later
    #[arg(short = 'U', long, value_name = "UUID")]
    pub uuid: Option<Uuid>,
    /// Compression of the data: none, lz4, zstd, or zstd:LEVEL with a level from 1 to 19; zstd is
    /// zstd:1
    #[arg(long, value_name = "CODEC", default_value_t)]
    pub compression: Codec,
    /// How often the metadata that everything else depends on is kept: 1 or 2. With 2, no single bad
    /// block takes the volume
    #[arg(long, value_name = "N", default_value = "2", value_parser = metadata_copies)]
    pub metadata_copies: MetadataCopies,
    /// Image file or block device
    pub volume: PathBuf,
}

#[derive(Debug, Args)]
pub struct Init {
    /// Size of a new volume in bytes, or with one of the suffixes K, M, G and T, which are powers
    /// of 1,024: 20G
    #[arg(long, value_name = "N")]
    pub size: Option<Size>,
    /// Also install a unit of systemd that mounts the volume at each login of the user
    #[arg(long)]
    pub unit: bool,
    /// Print the plan and change nothing
    #[arg(long, short = 'n')]
    pub dry_run: bool,
}

fn metadata_copies(text: &str) -> Result<MetadataCopies, String> {
    let count = text.parse().ok();
    let copies = count.and_then(MetadataCopies::from_count);
    copies.ok_or_else(|| "give 1 or 2".to_owned())
}

#[derive(Debug, Args)]
pub struct Mount {
    /// Mount options, comma separated, as the manual page explains them: ro, nosuid, nodev, noexec,
    /// nosymfollow, relatime, strictatime, noatime, nodiratime, sync, dirsync, allow_other,
    /// auto_unmount, compression=CODEC, recovery, snapshot=NAME, views=owner, views=all, views=none,
    /// io_uring, no_io_uring, ahead, no_ahead, threads=N, fsname=TEXT, memory=N, log=FILE
    #[arg(short = 'o', value_name = "OPTS")]
    pub options: Vec<String>,
    /// Stay in the foreground and serve until the volume is unmounted
    #[arg(long)]
    pub foreground: bool,
    /// Bound of all that the daemon allocates, such as 512M; less than 16M counts as 16M. The
    /// resident memory of the daemon stays below the sum of the bound and 64 MiB. The default is
    /// the smaller of a quarter of the machine's memory and half of the control group's limit
    #[arg(long, alias = "cache-size", value_name = "N")]
    pub memory: Option<Size>,
    /// Append the daemon's diagnostics to this file. Without a file and --foreground they are lost
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
    /// Report readiness or failure on standard output (how `ramet mount` starts its daemon)
    #[arg(long, hide = true)]
    pub daemon: bool,
    /// Image file or block device; without it and DIR, the volume that `ramet init` made
    #[arg(requires = "dir")]
    pub volume: Option<PathBuf>,
    /// Directory to mount on
    pub dir: Option<PathBuf>,
}

/// The task of the process that watches a daemon, when the daemon was killed.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Watch {
    /// Abort the connection: each request that waits for the daemon fails.
    Abort,
    /// Remove the mount as well.
    Remove,
}

#[derive(Debug, Args)]
pub struct Umount {
    /// Wait for the end of the daemon whose pipe is the standard input, and end its mount
    #[arg(long, hide = true, value_name = "TASK")]
    pub watch: Option<Watch>,
    /// Directory of the views of snapshots of that daemon, which go as well
    #[arg(long, hide = true, requires = "watch", value_name = "DIR")]
    pub views: Option<PathBuf>,
    /// Mount point of the volume. Default: that of `ramet init`
    #[arg(default_value_os_t = home::dir(), hide_default_value = true)]
    pub dir: PathBuf,
}

#[derive(Debug, Args)]
pub struct Clone {
    /// Replace DST, whole and atomically, when it exists: directories replace only directories, and
    /// other files only other files
    #[arg(long)]
    pub replace: bool,
    /// Refuse when DST exists, as without any option
    #[arg(long, hide = true, conflicts_with = "replace")]
    pub no_replace: bool,
    /// File or directory on a Ramet mount; of a symbolic link, the link itself, unless a slash
    /// follows
    pub src: PathBuf,
    /// Path of the copy on the same mount; with a slash at its end, the directory that gets the
    /// copy under the name of SRC
    pub dst: PathBuf,
}

#[derive(Debug, Args)]
pub struct Note {
    /// Text that `ramet forks` shows: up to 255 bytes without control characters
    #[arg(
        long = "note",
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true
    )]
    pub text: String,
}

#[derive(Debug, Args)]
pub struct Fork {
    /// Make N forks: NAME-1 to NAME-N, or without NAME the first N free ones of SRC-fork-1,
    /// SRC-fork-2 ...
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub count: Option<u32>,
    #[command(flatten)]
    pub note: Note,
    /// Keep no base: the fork takes no space but its own, and cannot be reset, refreshed or merged
    #[arg(long)]
    pub no_base: bool,
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
    /// Directory on a Ramet mount
    pub src: PathBuf,
    /// Path of the fork on the same mount; with a slash at its end, the directory that gets the fork
    /// under the name of SRC. Default: the first free of SRC-fork-1, SRC-fork-2 ...
    pub name: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct Forks {
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
    /// Leave out space, changes and users, which take a checkpoint and a look at many nodes and
    /// processes
    #[arg(long, short)]
    pub quick: bool,
    /// Directory: tell only the forks that lie in it, and those that were made of it. Default: all
    /// forks of the mount of the current directory, or of that of `ramet init`
    pub path: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct Drop {
    /// Drop also forks that processes use
    #[arg(short, long)]
    pub force: bool,
    /// Forks on a Ramet mount
    #[arg(value_name = "FORK", required = true)]
    pub forks: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub struct Reset {
    /// Reset also a fork that processes use: they keep the files that they have open, and their
    /// working directories are removed ones
    #[arg(short, long)]
    pub force: bool,
    /// Fork on a Ramet mount
    pub fork: PathBuf,
}

#[derive(Debug, Args)]
pub struct Refresh {
    /// Refresh also a fork that processes use: they go on in the fork as it was
    #[arg(short, long)]
    pub force: bool,
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
    /// Fork on a Ramet mount, with a base
    pub fork: PathBuf,
}

/// The treatment of ignored names by a merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Ignored {
    /// The destination keeps its own
    Keep,
    /// Directories that the fork changed replace those of the destination, each as a whole
    Take,
}

/// How trees are merged.
#[derive(Debug, Args)]
pub struct MergeHow {
    /// Where both sides changed a name in two ways, leave it as the destination has it
    #[arg(long, conflicts_with = "theirs")]
    pub ours: bool,
    /// Where both sides changed a name in two ways, take it from the fork
    #[arg(long)]
    pub theirs: bool,
    /// Names that git ignores
    #[arg(long, value_enum, default_value = "keep")]
    pub ignored: Ignored,
}

#[derive(Debug, Args)]
pub struct Merge {
    /// Directory that gets the changes. Default: the one that the fork was made of
    #[arg(long, value_name = "DST")]
    pub into: Option<PathBuf>,
    #[command(flatten)]
    pub how: MergeHow,
    /// Refuse a destination that changed since the fork was made
    #[arg(long)]
    pub ff_only: bool,
    /// Tell the changes and the conflicts, and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
    /// Fork on a Ramet mount
    pub fork: PathBuf,
}

/// The end of a try.
#[derive(Clone, Copy, Debug, Args)]
#[group(multiple = false)]
pub struct TryEnd {
    /// Commit the changes if the command succeeds, and drop the fork if nothing of it is left behind
    #[arg(long)]
    pub commit: bool,
    /// Keep the fork
    #[arg(long)]
    pub keep: bool,
    /// Drop the fork
    #[arg(long)]
    pub discard: bool,
    /// Ask on the terminal; without one, keep the fork (default)
    #[arg(long)]
    pub ask: bool,
}

#[derive(Debug, Args)]
pub struct Try {
    #[command(flatten)]
    pub end: TryEnd,
    #[command(flatten)]
    pub how: MergeHow,
    /// Path of the fork on the mount of SRC. Default: the first free of SRC.try-1, SRC.try-2 ...
    #[arg(long, value_name = "PATH")]
    pub name: Option<PathBuf>,
    #[command(flatten)]
    pub note: Note,
    /// Commit or drop the fork also while processes use it
    #[arg(long)]
    pub force: bool,
    /// Run the command in the fork at its own path: for systems that forbid user namespaces
    #[arg(long)]
    pub own_path: bool,
    /// Directory on a Ramet mount
    pub src: PathBuf,
    /// Command and its arguments
    #[arg(last = true, required = true)]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct Enter {
    /// Run it in the fork at its own path: for systems that forbid user namespaces
    #[arg(long)]
    pub own_path: bool,
    /// Fork on a Ramet mount
    pub fork: PathBuf,
    /// Command and its arguments. Default: $SHELL
    #[arg(last = true)]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct Swap {
    /// File or directory on a Ramet mount
    pub a: PathBuf,
    /// File or directory on the same mount
    pub b: PathBuf,
}

/// Sources and the place to which they go.
#[derive(Debug, Args)]
pub struct Transfer {
    /// Replace an object with the new name, atomically: directories replace only directories, and other
    /// files only other files. Of several SRC with one name, the first is taken and the others are
    /// refused
    #[arg(long)]
    pub replace: bool,
    /// Files and directories; of a symbolic link, the link itself
    #[arg(required = true)]
    pub src: Vec<PathBuf>,
    /// New path on a Ramet mount; with a slash at its end, or after more than one SRC, the directory
    /// that gets each of them under its own name
    pub dst: PathBuf,
}

#[derive(Debug, Args)]
pub struct Copy {
    /// Accepted for compatibility with cp(1): a copy always has all that is in a directory, and
    /// keeps all attributes
    #[arg(short, long, visible_short_aliases = ['r', 'R'])]
    pub archive: bool,
    #[command(flatten)]
    pub transfer: Transfer,
}

#[derive(Debug, Args)]
pub struct Rm {
    /// Ignore paths that do not exist
    #[arg(short, long)]
    pub force: bool,
    /// Accepted for compatibility with rm(1): directories are always removed with everything in
    /// them
    #[arg(short, long, visible_short_alias = 'R')]
    pub recursive: bool,
    /// Files and directories on a Ramet mount
    #[arg(value_name = "PATH", required_unless_present = "force")]
    pub paths: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub struct Sync {
    /// Also write a checkpoint, so that space counters are exact and the journal is empty
    #[arg(long)]
    pub checkpoint: bool,
    /// Any directory on the mount. Default: the mount point of `ramet init`
    #[arg(default_value_os_t = home::dir(), hide_default_value = true)]
    pub dir: PathBuf,
}

#[derive(Debug, Args)]
pub struct Fsck {
    /// Repair the volume as far as possible; changes of which only a damaged superblock knew are
    /// lost
    #[arg(long)]
    pub repair: bool,
    /// Make the tables of nodes and of free space anew, from the nodes that lie on the device, and
    /// repair the volume: for a volume of which both copies of a table are lost. It reads all of the
    /// device, and tells which files lost something
    #[arg(long)]
    pub rebuild: bool,
    /// Check every file of every clone too: it takes as long as a walk over all of them, and as much
    /// memory again as --memory says, or ends where the files take more
    #[arg(long)]
    pub files: bool,
    /// Memory that the check may take, such as 512M; the default is the smaller of a quarter of
    /// the machine's memory and half of the control group's limit
    #[arg(long, value_name = "N")]
    pub memory: Option<Size>,
    /// Print the findings as JSON
    #[arg(long)]
    pub json: bool,
    /// Image file or block device, not mounted. Default, without --repair and --rebuild: the volume
    /// of `ramet init`
    #[arg(
        default_value_os_t = home::volume(),
        hide_default_value = true,
        required_if_eq_any = [("repair", "true"), ("rebuild", "true")]
    )]
    pub volume: PathBuf,
}

#[derive(Debug, Args)]
pub struct Scrub {
    /// Read without pauses, so that other programs get less of the device
    #[arg(long)]
    pub fast: bool,
    /// Print the findings as JSON
    #[arg(long)]
    pub json: bool,
    /// Any directory on a Ramet mount. Default: the mount point of `ramet init`
    #[arg(default_value_os_t = home::dir(), hide_default_value = true)]
    pub dir: PathBuf,
}

#[derive(Debug, Args)]
pub struct Grow {
    /// New size of the volume, such as 20G; an image file needs it, and a block device is used whole
    /// without it
    #[arg(long, value_name = "N")]
    pub size: Option<Size>,
    /// Memory that the command may take for an unmounted volume, such as 512M; the default is the
    /// smaller of a quarter of the machine's memory and half of the control group's limit
    #[arg(long, value_name = "N")]
    pub memory: Option<Size>,
    /// A directory on a Ramet mount, or a volume. Default: the mount point of `ramet init`
    #[arg(default_value_os_t = home::dir(), hide_default_value = true)]
    pub target: PathBuf,
}

#[derive(Debug, Args)]
pub struct Stat {
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
    /// Memory that the command may take for an unmounted volume, such as 512M; the default is the
    /// smaller of a quarter of the machine's memory and half of the control group's limit
    #[arg(long, value_name = "N")]
    pub memory: Option<Size>,
    /// A directory on a Ramet mount, or an unmounted volume. Default: the mount point of `ramet init`
    #[arg(default_value_os_t = home::dir(), hide_default_value = true)]
    pub target: PathBuf,
}

#[derive(Debug, Args)]
pub struct Snapshot {
    #[command(subcommand)]
    pub verb: SnapshotVerb,
}

#[derive(Debug, Subcommand)]
pub enum SnapshotVerb {
    /// Make a snapshot
    ///
    /// Without DIR, of the volume of the current directory, or else of that of `ramet init`. One word
    /// alone is NAME.
    Create(SnapshotName),
    /// Tell the snapshots, the oldest first
    ///
    /// Each line has the time, the space that only this snapshot uses, its maker and its name. That
    /// space comes back when the snapshot is removed and the others are not. Snapshots with damaged
    /// records are told on standard error, and the exit status is 1.
    List(SnapshotList),
    /// Remove a snapshot
    ///
    /// Its space comes back in the background. Without DIR, the snapshot is one of the volume of the
    /// current directory. One word alone is NAME.
    Rm(SnapshotName),
    /// Make the files of a volume those of a snapshot again
    ///
    /// A snapshot of the state before is made along with it, and its name is told. All snapshots
    /// stay. Without DIR, the volume is that of the current directory.
    ///
    /// A volume may be mounted. Programs go on with the files that they have open, which have no names
    /// any more, and find nothing in directories of before, but for the one on which the volume is
    /// mounted. Names that come back have new inode numbers.
    Rollback(SnapshotRollback),
    /// Tell or set the policy by which the daemon makes snapshots, and removes those that it made
    ///
    /// POLICY tells how many are kept: hourly=24,daily=7,weekly=4,monthly=12, or some of them. A new
    /// volume has the policy none. Hours, days, weeks and months of 30 days are those of UTC.
    ///
    /// Each minute the daemon of a mount that is not read-only makes the snapshots that are due. Their
    /// names are period and time: hourly-20261125T220000Z. Then it removes the oldest ones that it made
    /// for each period, down to the number. A period that a new POLICY leaves out keeps none: all its
    /// snapshots go within a minute, but those that are mounted. The policy none makes no more, and
    /// removes none. Snapshots that a user made, and those of a rollback, are never removed.
    ///
    /// One word alone is POLICY if it is none or has an equals sign in it, and otherwise DIR.
    /// Snapshots of the policy that lie more than an hour ahead of the clock are told as well: the
    /// clock was ahead when they were made, or is behind now. The policy goes on without them.
    Policy(SnapshotPolicy),
}

#[derive(Debug, Args)]
#[command(allow_missing_positional = true)]
pub struct SnapshotName {
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
    /// A directory on the mount
    pub dir: Option<PathBuf>,
    /// Name of the snapshot
    #[arg(required = true)]
    pub name: String,
}

#[derive(Debug, Args)]
#[command(allow_missing_positional = true)]
pub struct SnapshotRollback {
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
    /// Memory that the command may take for an unmounted volume, such as 512M; the default is the
    /// smaller of a quarter of the machine's memory and half of the control group's limit
    #[arg(long, value_name = "N")]
    pub memory: Option<Size>,
    /// A directory on the mount, or a volume: image file or block device
    pub dir: Option<PathBuf>,
    /// Name of the snapshot
    #[arg(required = true)]
    pub name: String,
}

#[derive(Debug, Args)]
pub struct SnapshotList {
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
    /// Leave out the space of each, which takes a checkpoint and a look at many nodes
    #[arg(long, short)]
    pub quick: bool,
    /// A directory on the mount. Default: the current one, or else the mount point of `ramet init`
    pub dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct SnapshotPolicy {
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
    /// A directory on the mount. Default: the current one, or else the mount point of `ramet init`
    pub dir: Option<String>,
    /// Policy to set. Without it, the policy is told
    pub policy: Option<String>,
}

#[derive(Debug, Args)]
pub struct Diff {
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
    /// Compare the file or directory A as it was in this snapshot of the volume with that of today
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "b")]
    pub at: Option<String>,
    /// Directory on a Ramet mount; with --at a file, too
    pub a: PathBuf,
    /// Directory on the same mount
    #[arg(required_unless_present = "at")]
    pub b: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct Log {
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
    /// File or directory on a Ramet mount, which need not be there any more
    pub path: PathBuf,
}

#[derive(Debug, Args)]
pub struct Restore {
    /// Snapshot of the volume
    #[arg(long, value_name = "SNAPSHOT")]
    pub at: String,
    /// Replace DST, whole and atomically, when it exists: directories replace only directories, and
    /// other files only other files
    #[arg(long)]
    pub replace: bool,
    /// File or directory on a Ramet mount, which need not be there any more
    pub path: PathBuf,
    /// Path of the copy on the same mount; with a slash at its end, the directory that gets the copy
    /// under the name of PATH. Without DST, PATH itself, also with a slash at its end
    pub dst: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct Du {
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
    /// Directory on a Ramet mount. Default: the mount point of `ramet init`
    #[arg(default_value_os_t = home::dir(), hide_default_value = true)]
    pub dir: PathBuf,
}

#[derive(Debug, Args)]
pub struct Import {
    /// Read the new tree again, and compare checksums and attributes with the source as it was read
    #[arg(long)]
    pub verify: bool,
    /// Print as JSON: counts, bytes and seconds
    #[arg(long)]
    pub json: bool,
    /// Memory that the command may take for an unmounted volume, such as 512M; the default is the
    /// smaller of a quarter of the machine's memory and half of the control group's limit
    #[arg(long, value_name = "N")]
    pub memory: Option<Size>,
    /// Directory, tar archive (also .gz and .zst), or - for an archive on standard input
    pub src: PathBuf,
    /// Path of the new tree on a mount; with a slash at its end, the directory that gets the tree
    /// under the name of SRC. VOLUME:/PATH is a path in a volume that is not mounted. Default: the
    /// mount point of `ramet init`, for a tree under the name of SRC
    #[arg(default_value_os_t = home::inside(), hide_default_value = true)]
    pub dst: PathBuf,
}

#[derive(Debug, Args)]
pub struct Export {
    /// Directory, as a rule on a Ramet mount
    pub dir: PathBuf,
}

#[derive(Debug, Args)]
pub struct Send {
    /// Send the trees as this snapshot of the volume has them, and not those of today. A later --from
    /// takes its name
    #[arg(long, value_name = "SNAPSHOT")]
    pub at: Option<String>,
    /// Send the differences from this snapshot only: it was sent by --at and is still there, and the
    /// receiver has the trees as they came
    #[arg(long, value_name = "SNAPSHOT")]
    pub from: Option<String>,
    /// Leave out the first N sections, which the receiver has: 'ramet receive' tells the number
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub behind: u64,
    /// Memory that the command may take for an unmounted volume, such as 512M; the default is the
    /// smaller of a quarter of the machine's memory and half of the control group's limit
    #[arg(long, value_name = "N")]
    pub memory: Option<Size>,
    /// Directories on a Ramet mount; DIR/.ramet/snapshots/NAME/PATH is one of a snapshot. VOLUME and
    /// VOLUME:/PATH are directories of a volume that is not mounted
    #[arg(required = true)]
    pub dirs: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub struct Receive {
    /// Replace directories that have the names of the trees, each atomically: of an increment the
    /// tree that it has the differences from, or one that was received of the same snapshot
    #[arg(long)]
    pub replace: bool,
    /// With --replace, an increment replaces a directory that it has nothing to do with, too
    #[arg(long, requires = "replace")]
    pub force: bool,
    /// Tell the streams that were begun in DIR and not received to the end, and receive none
    #[arg(long, conflicts_with_all = ["replace", "discard"])]
    pub unfinished: bool,
    /// Remove the parts of streams that were begun in DIR and not received to the end, and receive
    /// none
    #[arg(long, conflicts_with = "replace")]
    pub discard: bool,
    /// Print as JSON: names, counts and bytes
    #[arg(long)]
    pub json: bool,
    /// Memory that the command may take for an unmounted volume, such as 512M; the default is the
    /// smaller of a quarter of the machine's memory and half of the control group's limit
    #[arg(long, value_name = "N")]
    pub memory: Option<Size>,
    /// Directory that gets the trees, on a Ramet mount. VOLUME and VOLUME:/PATH are directories of a
    /// volume that is not mounted
    pub dir: PathBuf,
}

#[derive(Debug, Args)]
pub struct Bench {
    /// Arguments of ramet-bench; --help shows them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub args: Vec<OsString>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Ramet::command().debug_assert();
    }

    #[test]
    fn verbs_parse_as_documented() {
        for limit in ["--memory", "--cache-size"] {
            let line = format!("ramet mount -o ro,noatime {limit} 64M vol.img /mnt");
            let Verb::Mount(mount) = Ramet::try_parse_from(line.split(' ')).unwrap().verb else {
                panic!("not a mount");
            };
            assert_eq!(mount.options, ["ro,noatime"]);
            assert_eq!(mount.memory.map(|s| s.bytes()), Some(64 << 20));
        }
        assert!(Ramet::try_parse_from(["ramet", "mkfs", "--size", "4X", "v"]).is_err());
    }

    #[test]
    fn commands_that_overwrite_or_remove_name_their_volume() {
        let parses = |line: &str| Ramet::try_parse_from(line.split(' ')).is_ok();
        for line in [
            "fsck",
            "fsck --json",
            "mount",
            "umount",
            "sync",
            "stat",
            "scrub",
            "du",
        ] {
            assert!(parses(&format!("ramet {line}")), "{line}");
        }
        for line in [
            "fsck --repair",
            "fsck --rebuild",
            "mkfs --size 1G",
            "rm",
            "mount vol.img",
        ] {
            assert!(!parses(&format!("ramet {line}")), "{line}");
        }
    }
}
