//! Work on a mount that takes memory of a daemon, and the process that does it.
//!
//! A load runs in a process of its own, so that it can be in a control group: version 1 charges
//! memory to the group of the process. The process is the test program once more, which runs only
//! its test `client` (see [`run_as_client`]).

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use rand::rngs::StdRng;
use rand::{RngCore, SeedableRng};

use crate::bed::run_ok;
use crate::control::clone_timed;

const MIB: usize = 1 << 20;
const PIECE_BYTES: usize = 4096;
const WRITERS: u64 = 300;
const CLIENTS: u64 = 1_000;
const MAPPED_WRITERS: usize = 8;
const FILES_PER_DIR: u64 = 1_000;

/// Stores numbers into pages of a mapped file, and reads them again after the mapping is gone.
const MAPPED_WRITER: &str = "\
import mmap, os, sys
path, size = sys.argv[1], int(sys.argv[2])
file = os.open(path, os.O_RDWR | os.O_CREAT)
os.ftruncate(file, size)
pages = mmap.mmap(file, size)
for at in range(0, size, 4096):
    pages[at:at + 8] = at.to_bytes(8, 'little')
pages.close()
os.fsync(file)
for at in range(0, size, 4096):
    assert os.pread(file, 8, at) == at.to_bytes(8, 'little'), at
";

/// A kind of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// Small files are created.
    Create,
    /// `find` looks at the attributes of each.
    Find,
    /// A directory is cloned.
    Clones,
    /// A large file is written and read.
    Large,
    /// 300 writers write pieces of 4 KiB.
    Writers,
    /// 1,000 clients create, write, read, list and remove files.
    Clients,
    /// Processes store into mapped files.
    Mapped,
}

/// How much of the work is done, in numbers of the full size.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Small files.
    pub files: u64,
    /// Clones.
    pub clones: u64,
    /// MiB of a large file, and a third of it by all other writers together.
    pub mib: u64,
}

impl Size {
    /// A part of the full size, in millionths.
    #[must_use]
    pub fn of(millionths: u64) -> Size {
        let part = |full: u64| (full * millionths / 1_000_000).max(1);
        Size {
            files: part(2_000_000),
            clones: part(100_000),
            mib: part(3072).max(30),
        }
    }

    fn from_env() -> Size {
        let number = |name| std::env::var(name).ok()?.parse().ok();
        let told = |name| number(name).expect("the parent process tells the size");
        Size {
            files: told("RAMET_CLIENT_FILES"),
            clones: told("RAMET_CLIENT_CLONES"),
            mib: told("RAMET_CLIENT_MIB"),
        }
    }
}

impl Load {
    /// All of them, in the order in which they follow each other on a volume.
    pub const ALL: [Load; 7] = [
        Load::Create,
        Load::Find,
        Load::Clones,
        Load::Large,
        Load::Writers,
        Load::Clients,
        Load::Mapped,
    ];

    fn name(self) -> String {
        format!("{self:?}")
    }

    /// The work that a reader of a table understands.
    #[must_use]
    pub fn title(self, size: &Size) -> String {
        match self {
            Load::Create => format!("{} files created", size.files),
            Load::Find => "find over them".to_owned(),
            Load::Clones => format!("{} clones", size.clones),
            Load::Large => format!("{} MiB written and read", size.mib),
            Load::Writers => format!("{WRITERS} writers of 4 KiB, {} MiB", size.mib / 3),
            Load::Clients => format!("{CLIENTS} clients"),
            Load::Mapped => {
                format!("{MAPPED_WRITERS} mapped writers, {} MiB", size.mib / 3)
            }
        }
    }

    /// Does the work in a process of its own, which runs the test `client` of this program, in the
    /// control group `group` if there is one.
    ///
    /// # Panics
    /// If the work fails.
    pub fn run(self, root: &Path, size: &Size, group: Option<&Path>) {
        let program = std::env::current_exe().expect("tests know their program");
        let mut command = in_group(group, &program);
        command.args(["--exact", "client", "--nocapture"]);
        command.env("RAMET_CLIENT", self.name());
        command.env("RAMET_CLIENT_ROOT", root);
        command.env("RAMET_CLIENT_FILES", size.files.to_string());
        command.env("RAMET_CLIENT_CLONES", size.clones.to_string());
        command.env("RAMET_CLIENT_MIB", size.mib.to_string());
        let out = command.stdin(Stdio::null()).output().expect("it runs");
        assert!(
            out.status.success(),
            "{self:?}: {}\n{}{}",
            out.status,
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        );
    }

    fn work(self, root: &Path, size: &Size) {
        match self {
            Load::Create => create(root, size.files),
            Load::Find => find(root, size.files),
            Load::Clones => clones(root, size.clones),
            Load::Large => large(root, size.mib),
            Load::Writers => writers(root, size.mib as usize * MIB / 3),
            Load::Clients => clients(root, size.mib as usize * MIB / 3),
            Load::Mapped => mapped(root, size.mib as usize * MIB / 3),
        }
    }
}

/// A command that runs `program` in the control group `group`.
#[must_use]
pub fn in_group(group: Option<&Path>, program: &Path) -> Command {
    let Some(group) = group else {
        return Command::new(program);
    };
    let mut shell = Command::new("sh");
    shell.args(["-c", "echo $$ >\"$0/cgroup.procs\" && exec \"$@\""]);
    shell.arg(group).arg(program);
    shell
}

/// The body of the test `client`: does the work that [`Load::run`] asked for, if any.
///
/// # Panics
/// If the work fails.
pub fn run_as_client() {
    let Ok(name) = std::env::var("RAMET_CLIENT") else {
        return;
    };
    let root = std::env::var_os("RAMET_CLIENT_ROOT").expect("a mount");
    let load = Load::ALL.into_iter().find(|load| load.name() == name);
    load.expect("a load").work(root.as_ref(), &Size::from_env());
}

fn create(root: &Path, files: u64) {
    let all = root.join("files");
    fs::create_dir(&all).expect("it is new");
    for number in 0..files {
        let dir = all.join(format!("dir{}", number / FILES_PER_DIR));
        if number % FILES_PER_DIR == 0 {
            fs::create_dir(&dir).expect("it is new");
        }
        fs::write(dir.join(format!("file{number}")), [7; 100]).expect("there is room");
    }
}

fn find(root: &Path, files: u64) {
    let all = root.join("files");
    let found = run_ok(
        "find",
        &[all.to_str().expect("UTF-8"), "-size", "1", "-printf", "x"],
    );
    assert_eq!(found.len() as u64, files);
}

fn clones(root: &Path, clones: u64) {
    let source = root.join("source");
    fs::create_dir(&source).expect("it is new");
    for number in 0..100_u64 {
        fs::write(source.join(number.to_string()), number.to_le_bytes()).expect("room");
    }
    let all = root.join("clones");
    fs::create_dir(&all).expect("it is new");
    for number in 0..clones {
        clone_timed(&source, &all, &format!("clone{number}")).expect("it can be cloned");
        if number % 100 == 0 {
            let edited = all.join(format!("clone{number}/7"));
            fs::write(edited, number.to_le_bytes()).expect("there is room");
        }
    }
}

fn large(root: &Path, mib: u64) {
    let path = root.join("large");
    let mut rng = StdRng::seed_from_u64(mib);
    let mut part = vec![0; MIB];
    let mut file = File::create(&path).expect("it is new");
    for _ in 0..mib {
        rng.fill_bytes(&mut part);
        file.write_all(&part).expect("there is room");
    }
    file.sync_all().expect("it can be synced");
    drop(file);
    // Pages of other mounts stay: only this file is read from the daemon again.
    let file = File::open(&path).expect("it is there");
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("a file");
    let (mut file, mut rng) = (file, StdRng::seed_from_u64(mib));
    let mut expected = part.clone();
    for number in 0..mib {
        rng.fill_bytes(&mut expected);
        file.read_exact(&mut part).expect("it was written");
        assert!(part == expected, "MiB {number} differs");
    }
}

fn writers(root: &Path, bytes: usize) {
    let all = root.join("writers");
    fs::create_dir(&all).expect("it is new");
    let pieces = bytes / WRITERS as usize / PIECE_BYTES;
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let path = all.join(writer.to_string());
            scope.spawn(move || {
                let mut piece = vec![0; PIECE_BYTES];
                rand::rng().fill_bytes(&mut piece);
                let mut file = File::create(path).expect("it is new");
                for number in 0..pieces {
                    piece[..8].copy_from_slice(&number.to_le_bytes());
                    file.write_all(&piece).expect("there is room");
                }
            });
        }
    });
}

fn clients(root: &Path, bytes: usize) {
    let all = root.join("clients");
    fs::create_dir(&all).expect("it is new");
    let bytes = (bytes / CLIENTS as usize / 4).max(PIECE_BYTES);
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let dir = all.join(client.to_string());
            scope.spawn(move || {
                fs::create_dir(&dir).expect("it is new");
                for number in 0..4 {
                    let contents = vec![number; bytes];
                    let path = dir.join(number.to_string());
                    fs::write(&path, &contents).expect("there is room");
                    assert!(fs::read(&path).expect("it is there") == contents);
                }
                assert_eq!(fs::read_dir(&dir).expect("it is there").count(), 4);
                fs::remove_file(dir.join("0")).expect("it is there");
            });
        }
    });
}

fn mapped(root: &Path, bytes: usize) {
    let all = root.join("mapped");
    fs::create_dir(&all).expect("it is new");
    let bytes = (bytes / MAPPED_WRITERS).next_multiple_of(PIECE_BYTES);
    let start = |number: usize| {
        let path = all.join(number.to_string());
        let mut writer = Command::new("python3");
        writer.args(["-c", MAPPED_WRITER]).arg(path);
        writer.arg(bytes.to_string()).stdin(Stdio::null());
        writer.spawn().expect("./test installs python3")
    };
    let writers: Vec<_> = (0..MAPPED_WRITERS).map(start).collect();
    for mut writer in writers {
        let ended = writer.wait().expect("it is our child");
        assert!(ended.success(), "a mapped writer: {ended}");
    }
}
