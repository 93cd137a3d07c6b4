//! Streams between real mounts and volumes that are not mounted, compared by rsync.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use ramet_e2e::kinds::{assert_same, make_every_kind};
use ramet_e2e::{Bed, done, ramet_bin, run_ok, text};

/// Both transports, as options of `ramet mount`.
const TRANSPORTS: [&str; 2] = ["no_io_uring", "io_uring"];
const USER: u32 = 65534;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Sends to a file.
fn send(args: &[&str], to: &Path) {
    let mut command = Command::new(ramet_bin());
    command
        .arg("send")
        .args(args)
        .stdout(File::create(to).unwrap());
    let sent = command.stderr(Stdio::piped()).output().unwrap();
    assert!(sent.status.success(), "{args:?}: {sent:?}");
}

fn receive(args: &[&str], from: &Path) -> Output {
    let mut command = Command::new(ramet_bin());
    let input = File::open(from).unwrap();
    command.arg("receive").args(args).stdin(input);
    command.output().unwrap()
}

fn received(args: &[&str], from: &Path) -> String {
    let output = receive(args, from);
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The reason for which a stream is refused. The directory has nothing of it then.
fn refused(args: &[&str], from: &Path, dir: &Path) -> String {
    let before = names(dir);
    let output = receive(args, from);
    assert!(!output.status.success(), "{args:?}");
    assert_eq!(names(dir), before);
    String::from_utf8(output.stderr).unwrap()
}

fn names(dir: &Path) -> Vec<PathBuf> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    names.sort();
    names
}

#[test]
fn tree_and_increments_come_with_everything() {
    for transport in TRANSPORTS {
        let (bed, other) = (Bed::new("2G"), Bed::new("2G"));
        let (mount, there) = (
            bed.mount(&["-o", transport]),
            other.mount(&["-o", transport]),
        );
        let (root, dst) = (mount.root().to_owned(), there.root().to_owned());
        let stream = |name: &str| bed.path().join(name);
        make_every_kind(&root.join("tree"));
        done(&[
            "clone",
            text(&root.join("tree/d")),
            text(&root.join("tree/d2")),
        ]);
        done(&["snapshot", "create", text(&root), "monday"]);
        send(
            &["--at", "monday", text(&root.join("tree"))],
            &stream("first"),
        );
        // The view of the snapshot is another name of the same tree.
        let view = root.join(".ramet/snapshots/monday/tree");
        send(&[text(&view)], &stream("view"));
        assert_eq!(
            fs::read(stream("view")).unwrap(),
            fs::read(stream("first")).unwrap()
        );
        let told = received(&[text(&dst)], &stream("first"));
        assert!(told.contains("1 copies"), "{told}");
        assert_same(&root.join("tree"), &dst.join("tree"));
        let links = |name: &str| dst.join("tree").join(name).metadata().unwrap();
        assert_eq!(
            (links("hard").nlink(), links("hard").ino()),
            (3, links("d/e/hard").ino())
        );
        let why = refused(&[text(&dst)], &stream("first"), &dst);
        assert!(why.contains("already exists"), "{why}");
        // Both sides go on.
        fs::write(root.join("tree/d/e/7-nnnnnnn"), "other").unwrap();
        fs::rename(root.join("tree/d2"), root.join("tree/moved")).unwrap();
        fs::remove_file(root.join("tree/hard")).unwrap();
        fs::write(dst.join("tree/of the receiver"), "stays out").unwrap();
        done(&["snapshot", "create", text(&root), "tuesday"]);
        let tree = root.join("tree");
        send(
            &["--at", "tuesday", "--from", "monday", text(&tree)],
            &stream("second"),
        );
        assert!(stream("second").metadata().unwrap().len() < 2000);
        let json = received(&["--replace", "--json", text(&dst)], &stream("second"));
        assert!(
            json.contains("\"copies\": 1"),
            "the directory that was moved: {json}"
        );
        assert_same(&root.join("tree"), &dst.join("tree"));
        assert_eq!(names(&dst), [dst.join("tree")]);
        let why = refused(&["--replace", text(&dst)], &stream("second"), &dst);
        assert!(why.contains("was not received here"), "{why}");
        let forks = done(&["forks", text(&dst)]);
        assert!(forks.contains("received "), "{forks}");
        mount.umount();
        there.umount();
        bed.fsck();
        other.fsck();
    }
}

#[test]
fn volumes_that_are_not_mounted_send_and_receive() {
    let (bed, other) = (Bed::new("2G"), Bed::new("2G"));
    let mount = bed.mount(&[]);
    make_every_kind(&mount.root().join("a/tree"));
    mount.umount();
    let stream = bed.path().join("stream");
    let inside = format!("{}:/a/tree", text(&bed.volume()));
    send(&[&inside], &stream);
    received(&[text(&other.volume())], &stream);
    let why = receive(&[text(&other.volume())], &stream);
    assert!(!why.status.success());
    // The whole volume, from the image itself.
    send(&[text(&other.volume())], &stream);
    let there = bed.mount(&[]);
    received(&[text(there.root())], &stream);
    let name = other.volume().file_stem().unwrap().to_owned();
    let (tree, copy) = (
        there.root().join("a/tree"),
        there.root().join(name).join("tree"),
    );
    assert_same(&tree, &copy);
    there.umount();
    bed.fsck();
    other.fsck();
}

#[test]
fn damaged_cut_and_foreign_streams_leave_nothing() {
    let bed = Bed::new("1G");
    let mount = bed.mount(&[]);
    let root = mount.root().to_owned();
    make_every_kind(&root.join("tree"));
    let stream = bed.path().join("stream");
    send(&[text(&root.join("tree"))], &stream);
    let dst = root.join("dst");
    fs::create_dir(&dst).unwrap();
    let whole = fs::read(&stream).unwrap();
    let wrong = bed.path().join("wrong");
    for (bytes, words) in [
        (whole[..whole.len() - 1].to_vec(), "ends early"),
        (whole[..20].to_vec(), "ends early"),
        (
            b"PK\x03\x04 and more than forty bytes of something else".to_vec(),
            "no stream",
        ),
    ] {
        fs::write(&wrong, bytes).unwrap();
        let why = refused(&[text(&dst)], &wrong, &dst);
        assert!(why.contains(words), "{why}");
    }
    for place in [10, 60, whole.len() / 2, whole.len() - 1] {
        let mut bytes = whole.clone();
        bytes[place] ^= 4;
        fs::write(&wrong, bytes).unwrap();
        refused(&[text(&dst)], &wrong, &dst);
    }
    mount.umount();
    bed.fsck();
}

/// A directory with 150 MiB that no compression makes smaller.
fn fill(dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    let mut random = File::open("/dev/urandom").unwrap();
    let mut bytes = vec![0; 5 << 20];
    for number in 0..30 {
        random.read_exact(&mut bytes).unwrap();
        fs::write(dir.join(number.to_string()), &bytes).unwrap();
    }
}

/// The number behind these words.
fn number_behind(text: &str, words: &str) -> u64 {
    let rest = text.split(words).nth(1).unwrap_or_else(|| panic!("{text}"));
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap()
}

#[test]
fn command_that_is_killed_goes_on_behind_its_checkpoint() {
    let (bed, other) = (Bed::new("1G"), Bed::new("1G"));
    let (mount, there) = (bed.mount(&[]), other.mount(&[]));
    fill(&mount.root().join("tree"));
    done(&["snapshot", "create", text(mount.root()), "s"]);
    let stream = bed.path().join("stream");
    let tree = mount.root().join("tree");
    send(&["--at", "s", text(&tree)], &stream);
    let whole = fs::read(&stream).unwrap();
    let mut command = Command::new(ramet_bin());
    command
        .args(["receive", text(there.root())])
        .stdin(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    // The pipe holds less than the rest, so the command waits for more.
    input.write_all(&whole[..100 << 20]).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!there.root().join("tree").exists());
    // The next stream has the sections behind the checkpoint of that command alone.
    let told = done(&["receive", "--unfinished", text(there.root())]);
    let first = number_behind(&told, "behind section ");
    assert!((60..100).contains(&first), "{told}");
    let cut = bed.path().join("cut");
    let behind = |section: u64| {
        let section = section.to_string();
        send(&["--at", "s", "--behind", &section, text(&tree)], &cut);
    };
    behind(first);
    let rest = fs::read(&cut).unwrap();
    fs::write(&cut, &rest[..rest.len() - 10]).unwrap();
    let output = receive(&[text(there.root())], &cut);
    let why = String::from_utf8(output.stderr).unwrap();
    let section = number_behind(&why, "--behind ");
    assert!(section > first, "{why}");
    // The checkpoint is durable as all others are.
    done(&["sync", text(there.root())]);
    there.kill_daemon();
    there.detach_dead();
    let there = other.mount(&[]);
    behind(section);
    assert!(cut.metadata().unwrap().len() < stream.metadata().unwrap().len() / 2);
    let json = received(&["--json", text(there.root())], &cut);
    assert!(
        json.contains(&format!("\"resumed_behind\": {section}")),
        "{json}"
    );
    assert_same(&tree, &there.root().join("tree"));
    assert_eq!(names(there.root()), [there.root().join("tree")]);
    mount.umount();
    there.umount();
    bed.fsck();
    other.fsck();
}

#[test]
fn users_receive_files_of_their_own_and_send_no_others() {
    if !is_root() {
        return;
    }
    let bed = Bed::new("1G");
    let mount = bed.mount(&["-o", "allow_other"]);
    let root = mount.root().to_owned();
    let tree = root.join("tree");
    fs::create_dir_all(tree.join("closed")).unwrap();
    fs::write(tree.join("closed/file"), "x").unwrap();
    for (name, mode) in [("closed/file", 0o4444), ("closed", 0o555)] {
        fs::set_permissions(tree.join(name), PermissionsExt::from_mode(mode)).unwrap();
    }
    done(&["clone", text(&tree), text(&root.join("tree/clone"))]);
    fs::write(root.join("tree/clone/closed/new"), "y").unwrap();
    let stream = bed.path().join("stream");
    send(&[text(&tree)], &stream);
    let home = root.join("home");
    fs::create_dir(&home).unwrap();
    run_ok("chown", &[&USER.to_string(), text(&home)]);
    fs::set_permissions(bed.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let ramet = bed.command_for_others();
    let as_user = |args: &[&str], input: Stdio| {
        let ids = [format!("--reuid={USER}"), format!("--regid={USER}")];
        let mut command = Command::new("setpriv");
        command
            .args(ids)
            .arg("--clear-groups")
            .arg(&ramet)
            .args(args);
        command.stdin(input).output().unwrap()
    };
    let input = File::open(&stream).unwrap().into();
    let taken = as_user(&["receive", text(&home)], input);
    assert!(taken.status.success(), "{taken:?}");
    let sent = as_user(&["send", text(&home.join("tree"))], Stdio::null());
    let told = String::from_utf8(sent.stderr).unwrap();
    assert!(told.contains("only root and the user"), "{told}");
    let file = home.join("tree/clone/closed/file").metadata();
    let file = file.unwrap_or_else(|e| panic!("{e}: {told}"));
    assert_eq!((file.uid(), file.mode() & 0o7777), (USER, 0o444));
    let closed = home.join("tree/clone/closed").metadata().unwrap();
    assert_eq!(closed.mode() & 0o7777, 0o555);
    assert_eq!(fs::read(home.join("tree/clone/closed/new")).unwrap(), b"y");
    assert_eq!(names(&home), [home.join("tree")]);
    mount.umount();
    bed.fsck();
}
