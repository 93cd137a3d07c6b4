//! Streams that nobody should trust, received on real mounts.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use ramet_block::Writer;
use ramet_e2e::{Bed, done, ramet_bin, run_ok, text};
use ramet_fs::{
    Kind, NewObject, Sections, SentAttributes, SentFlags, StreamId, StreamItem, Time,
    encode_stream_head,
};

const USER: u32 = 65534;
const ID: StreamId = StreamId([7; 16]);

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn receive(args: &[&str], from: &Path) -> Output {
    let mut command = Command::new(ramet_bin());
    let input = File::open(from).unwrap();
    command.arg("receive").args(args).stdin(input);
    command.output().unwrap()
}

fn names(dir: &Path) -> Vec<PathBuf> {
    let names = fs::read_dir(dir).unwrap();
    let mut names: Vec<_> = names.map(|e| e.unwrap().path()).collect();
    names.sort();
    names
}

/// A stream of one section with these items and their end.
fn stream_of(items: &[StreamItem<'_>]) -> Vec<u8> {
    let mut w = Writer::new();
    for item in items {
        item.encode(&mut w);
    }
    StreamItem::End(items.len() as u64).encode(&mut w);
    let section = Sections::of(ID).encode(w.as_slice(), true);
    [&encode_stream_head(ID)[..], &section].concat()
}

/// A tree `tree` with a directory as its top, and these items.
fn stream_with(items: &[StreamItem<'_>]) -> Vec<u8> {
    let (name, id, base) = (&b"tree"[..], StreamId([1; 16]), None);
    let (path, object) = (&b""[..], NewObject::Directory);
    let begin = [
        StreamItem::Root { name, id, base },
        StreamItem::Begin(0),
        StreamItem::Make { path, object },
    ];
    stream_of(&[&begin[..], items].concat())
}

#[test]
fn contents_of_devices_are_refused_unopened() {
    if !is_root() {
        return;
    }
    let bed = Bed::new("1G");
    let mount = bed.mount(&[]);
    let (root, stream) = (mount.root(), bed.path().join("stream"));
    // The device that takes all bytes: the kernel would not refuse them.
    let null = StreamItem::Make {
        path: b"null",
        object: NewObject::Special(Kind::CharDevice, 0x103),
    };
    let offset = 4096;
    for item in [
        StreamItem::Data {
            offset,
            bytes: b"for the disk",
        },
        StreamItem::Hole { offset, len: 4096 },
        StreamItem::Size(5),
    ] {
        for looks in [&[null][..], &[null, StreamItem::At(b"null")]] {
            fs::write(&stream, stream_with(&[looks, &[item]].concat())).unwrap();
            let output = receive(&[text(root)], &stream);
            let why = String::from_utf8(output.stderr).unwrap();
            assert!(why.contains("makes no sense"), "{item:?}: {why}");
            assert_eq!(names(root), [] as [PathBuf; 0]);
        }
    }
    // Flags of a device are left out, and the device is made.
    let flags = SentFlags {
        no_dump: true,
        ..SentFlags::default()
    };
    fs::write(&stream, stream_with(&[null, StreamItem::Flags(flags)])).unwrap();
    let output = receive(&[text(root)], &stream);
    assert!(output.status.success(), "{output:?}");
    mount.umount();
    bed.fsck();
}

/// Runs the command as an ordinary user.
fn as_user(ramet: &Path, args: &[&str], from: &Path) -> Output {
    let ids = [format!("--reuid={USER}"), format!("--regid={USER}")];
    let mut command = Command::new("setpriv");
    command
        .args(ids)
        .arg("--clear-groups")
        .arg(ramet)
        .args(args);
    command.stdin(File::open(from).unwrap()).output().unwrap()
}

fn send(args: &[&str], to: &Path) {
    let mut command = Command::new(ramet_bin());
    let output = File::create(to).unwrap();
    command.arg("send").args(args).stdout(output);
    let sent = command.stderr(Stdio::piped()).output().unwrap();
    assert!(sent.status.success(), "{args:?}: {sent:?}");
}

const CLOSED: [(&str, u32); 6] = [
    ("closed/read", 0o444),
    ("closed", 0o500),
    ("secret/file", 0o600),
    ("secret/write", 0o200),
    ("secret", 0o300),
    ("", 0o555),
];

fn close(tree: &Path) {
    for (name, mode) in CLOSED {
        fs::set_permissions(tree.join(name), PermissionsExt::from_mode(mode)).unwrap();
    }
}

fn note(path: &Path, value: &str) {
    run_ok("setfattr", &["-n", "user.note", "-v", value, text(path)]);
}

/// Modes, notes and flags of the objects of a tree.
fn look_of(tree: &Path) -> Vec<(u32, String, String)> {
    let look = |(name, _): &(&str, u32)| {
        let path = tree.join(name);
        let notes = [
            "--only-values",
            "-m",
            "user.",
            "-d",
            "--absolute-names",
            text(&path),
        ];
        let flags = run_ok("lsattr", &["-d", text(&path)]);
        let flags = flags.split(' ').next().unwrap().to_owned();
        let mode = path.symlink_metadata().unwrap().mode();
        (mode, run_ok("getfattr", &notes), flags)
    };
    CLOSED.iter().map(look).collect()
}

#[test]
fn user_receives_objects_that_their_owner_may_not_use() {
    if !is_root() {
        return;
    }
    let bed = Bed::new("1G");
    let mount = bed.mount(&["-o", "allow_other"]);
    let (root, stream) = (mount.root().to_owned(), bed.path().join("stream"));
    let tree = root.join("tree");
    for name in ["closed", "secret"] {
        fs::create_dir_all(tree.join(name)).unwrap();
    }
    for name in ["closed/read", "secret/file", "secret/write"] {
        fs::write(tree.join(name), name).unwrap();
    }
    let noted = ["closed/read", "closed", "secret/write"].map(|name| tree.join(name));
    noted.iter().for_each(|path| note(path, "first"));
    close(&tree);
    done(&["snapshot", "create", text(&root), "monday"]);
    send(&["--at", "monday", text(&tree)], &stream);
    // The user may search the directory above, and not list it.
    let home = root.join("outer/home");
    fs::create_dir_all(&home).unwrap();
    run_ok("chown", &[&USER.to_string(), text(&home)]);
    fs::set_permissions(root.join("outer"), PermissionsExt::from_mode(0o711)).unwrap();
    let ramet = bed.command_for_others();
    let taken = as_user(&ramet, &["receive", text(&home)], &stream);
    assert!(taken.status.success(), "{taken:?}");
    assert_eq!(look_of(&home.join("tree")), look_of(&tree));
    // An increment works in directories that are closed from the beginning.
    fs::write(tree.join("secret/file"), "other").unwrap();
    fs::hard_link(tree.join("secret/file"), tree.join("secret/link")).unwrap();
    fs::write(tree.join("closed/new"), "new").unwrap();
    noted[..1].iter().for_each(|path| note(path, "second"));
    run_ok("setfattr", &["-x", "user.note", text(&noted[1])]);
    run_ok("chattr", &["+d", text(&noted[2])]);
    run_ok("chattr", &["+d", text(&tree.join("secret"))]);
    close(&tree);
    done(&["snapshot", "create", text(&root), "tuesday"]);
    let args = ["--at", "tuesday", "--from", "monday", text(&tree)];
    send(&args, &stream);
    let taken = as_user(&ramet, &["receive", "--replace", text(&home)], &stream);
    assert!(taken.status.success(), "{taken:?}");
    let there = home.join("tree");
    assert_eq!(look_of(&there), look_of(&tree));
    assert_eq!(fs::read(there.join("secret/link")).unwrap(), b"other");
    assert_eq!(fs::read(there.join("closed/new")).unwrap(), b"new");
    assert_eq!(names(&home), [there]);
    mount.umount();
    bed.fsck();
}

#[test]
fn streams_that_were_begun_are_told_and_discarded() {
    let bed = Bed::new("1G");
    let mount = bed.mount(&[]);
    let (root, stream) = (mount.root(), bed.path().join("stream"));
    let mut child = Command::new(ramet_bin());
    child.args(["receive", text(root)]).stdin(Stdio::piped());
    let mut child = child.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    // Two sections: the second one is not there, so the command waits for it.
    let mut w = Writer::new();
    let (name, id, base) = (&b"tree"[..], StreamId([1; 16]), None);
    StreamItem::Root { name, id, base }.encode(&mut w);
    StreamItem::Begin(0).encode(&mut w);
    let section = Sections::of(ID).encode(w.as_slice(), false);
    let begun = [&encode_stream_head(ID)[..], &section].concat();
    input.write_all(&begun).unwrap();
    let digits = "07".repeat(16);
    let stage = root.join(format!(".ramet-receive-{digits}"));
    while !stage.join("now").exists() {
        assert!(child.try_wait().unwrap().is_none());
        std::thread::yield_now();
    }
    let told = done(&["receive", "--unfinished", text(root)]);
    assert_eq!(told, format!("{digits}: is being received\n"));
    let told = done(&["receive", "--discard", text(root)]);
    assert_eq!(told, format!("{digits}: is being received\n"));
    fs::write(&stream, &begun).unwrap();
    let output = receive(&[text(root)], &stream);
    let why = String::from_utf8(output.stderr).unwrap();
    assert!(why.contains("another command"), "{why}");
    child.kill().unwrap();
    child.wait().unwrap();
    let told = done(&["receive", "--unfinished", "--json", text(root)]);
    assert!(told.contains("\"behind\": null"), "{told}");
    assert!(stage.exists());
    let told = done(&["receive", "--discard", text(root)]);
    assert_eq!(told, format!("{digits}: removed\n"));
    assert_eq!(names(root), [] as [PathBuf; 0]);
    mount.umount();
    bed.fsck();
}

/// The beginning of a stream, long enough for a checkpoint. The bytes are few.
fn long_beginning(id: StreamId) -> Vec<u8> {
    let zeros = vec![0; 128 << 10];
    let (name, base) = (&b"tree"[..], None);
    let mut bytes = encode_stream_head(id).to_vec();
    let mut sections = Sections::of(id);
    for number in 0..36 {
        let mut w = Writer::new();
        if number == 0 {
            let (path, object) = (&b""[..], NewObject::Directory);
            StreamItem::Root { name, id, base }.encode(&mut w);
            StreamItem::Begin(0).encode(&mut w);
            StreamItem::Make { path, object }.encode(&mut w);
        }
        let (path, object) = (format!("file {number}"), NewObject::File(0));
        let path = path.as_bytes();
        StreamItem::Make { path, object }.encode(&mut w);
        for place in 0..15 {
            let (offset, bytes) = (place * zeros.len() as u64, &zeros[..]);
            StreamItem::Data { offset, bytes }.encode(&mut w);
        }
        bytes.extend(sections.encode(w.as_slice(), false));
    }
    bytes
}

#[test]
fn part_of_a_stream_stays_only_if_it_may_come_again() {
    let bed = Bed::new("1G");
    let mount = bed.mount(&[]);
    let (root, stream) = (mount.root(), bed.path().join("stream"));
    let id = |version: u8| {
        let mut bytes = [7; 16];
        bytes[6] = version << 4;
        StreamId(bytes)
    };
    for (version, is_file, stays) in [(4, false, false), (4, true, true), (8, false, true)] {
        let bytes = long_beginning(id(version));
        let why = if is_file {
            fs::write(&stream, bytes).unwrap();
            receive(&[text(root)], &stream).stderr
        } else {
            let mut child = Command::new(ramet_bin());
            child.args(["receive", text(root)]).stderr(Stdio::piped());
            let mut child = child.stdin(Stdio::piped()).spawn().unwrap();
            child.stdin.take().unwrap().write_all(&bytes).unwrap();
            child.wait_with_output().unwrap().stderr
        };
        let why = String::from_utf8(why).unwrap();
        assert!(why.contains("ends early"), "{why}");
        assert_eq!(why.contains("goes on behind"), stays, "{why}");
        assert_eq!(names(root).len(), usize::from(stays), "version {version}");
        done(&["receive", "--discard", text(root)]);
        assert_eq!(names(root), [] as [PathBuf; 0]);
    }
    mount.umount();
    bed.fsck();
}

/// The head and two sections of a stream with two directories that nobody may write.
fn two_closed_roots() -> [Vec<u8>; 3] {
    let (mut w, mut sections) = (Writer::new(), Sections::of(ID));
    let (path, object, base) = (&b""[..], NewObject::Directory, None);
    let time = Time { secs: 7, nanos: 7 };
    let closed = SentAttributes {
        perm: 0o555,
        uid: 0,
        gid: 0,
        atime: time,
        mtime: time,
    };
    for (number, name) in [(1, &b"first"[..]), (2, b"second")] {
        let id = StreamId([number; 16]);
        StreamItem::Root { name, id, base }.encode(&mut w);
    }
    for number in 0..2 {
        StreamItem::Begin(number).encode(&mut w);
        StreamItem::Make { path, object }.encode(&mut w);
        StreamItem::Attributes(closed).encode(&mut w);
    }
    let first = sections.encode(w.as_slice(), false);
    let mut w = Writer::new();
    StreamItem::End(8).encode(&mut w);
    let last = sections.encode(w.as_slice(), true);
    [encode_stream_head(ID).to_vec(), first, last]
}

/// A command whose process may not write a directory gives it a wider mode to exchange it. This one
/// ends between the names of two roots, and the first one has such a mode, as after a kill.
#[test]
fn tree_that_has_its_name_already_gets_its_mode_again() {
    if !is_root() {
        return;
    }
    let bed = Bed::new("1G");
    let mount = bed.mount(&["-o", "allow_other"]);
    let (root, stream) = (mount.root().to_owned(), bed.path().join("stream"));
    let [head, first, last] = two_closed_roots();
    fs::write(&stream, [&head[..], &first, &last].concat()).unwrap();
    let home = root.join("home");
    fs::create_dir_all(&home).unwrap();
    run_ok("chown", &[&USER.to_string(), text(&home)]);
    let ramet = bed.command_for_others();
    let ids = [format!("--reuid={USER}"), format!("--regid={USER}")];
    let mut child = Command::new("setpriv");
    child.args(ids).arg("--clear-groups").arg(&ramet);
    child.args(["receive", text(&home)]).stderr(Stdio::piped());
    let mut child = child.stdin(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(&[&head[..], &first].concat()).unwrap();
    let digits = "07".repeat(16);
    let stage = home.join(format!(".ramet-receive-{digits}"));
    while !stage.join("now/1").exists() {
        assert!(child.try_wait().unwrap().is_none());
        std::thread::yield_now();
    }
    let (first, second) = (home.join("first"), home.join("second"));
    fs::create_dir(&second).unwrap();
    input.write_all(&last).unwrap();
    drop(input);
    let why = String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap();
    assert!(why.contains("second: already exists"), "{why}");
    assert!(why.contains("goes on behind section 2"), "{why}");
    let mode = |path: &Path| path.metadata().unwrap().mode() & 0o7777;
    assert_eq!(mode(&first), 0o555);
    fs::set_permissions(&first, PermissionsExt::from_mode(0o755)).unwrap();
    fs::remove_dir(&second).unwrap();
    let taken = as_user(&ramet, &["receive", text(&home)], &stream);
    assert!(taken.status.success(), "{taken:?}");
    assert_eq!([mode(&first), mode(&second)], [0o555; 2]);
    assert_eq!(names(&home), [first, second]);
    mount.umount();
    bed.fsck();
}
