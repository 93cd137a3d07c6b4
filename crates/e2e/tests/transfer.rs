//! `ramet swap`, `ramet mv` and `ramet cp` on a real mount.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Output;

use ramet_e2e::{Bed, ramet_bin, run, run_ok, until};

/// A mount with a few trees, and a folder beside it on another file system.
struct Place {
    mount: ramet_e2e::Mount,
    outside: PathBuf,
    bed: Bed,
}

impl Place {
    fn new() -> Place {
        let bed = Bed::new("1G");
        let mount = bed.mount(&[]);
        let outside = bed.path().join("outside");
        for top in [mount.root(), &outside] {
            for dir in ["a/deep", "b"] {
                fs::create_dir_all(top.join(dir)).unwrap();
            }
            fs::write(top.join("a/deep/file"), "of a").unwrap();
            fs::write(top.join("b/file"), "of b").unwrap();
            fs::write(top.join("file"), "plain").unwrap();
            symlink("nowhere", top.join("link")).unwrap();
        }
        Place {
            mount,
            outside,
            bed,
        }
    }

    fn at(&self, name: &str) -> PathBuf {
        match name.strip_prefix("outside/") {
            Some(name) => self.outside.join(name),
            // A slash at the end stays there.
            None => format!("{}/{name}", self.mount.root().display()).into(),
        }
    }

    /// Runs a verb; the last arguments are paths.
    fn call(&self, verb: &[&str], paths: &[&str]) -> Output {
        let paths = paths.iter().map(|path| self.at(path).into_os_string());
        let args: Vec<_> = verb.iter().map(Into::into).chain(paths).collect();
        run(ramet_bin(), &args)
    }

    fn must(&self, verb: &[&str], paths: &[&str]) -> String {
        let out = self.call(verb, paths);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{verb:?} {paths:?}: {said}");
        said
    }

    /// The call fails with status 1 and tells this.
    fn refuses(&self, verb: &[&str], paths: &[&str], why: &str) {
        let out = self.call(verb, paths);
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{verb:?} {paths:?}: {said}");
        assert!(said.contains(why), "{verb:?} {paths:?}: {said}");
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.at(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    fn has(&self, name: &str) -> bool {
        fs::symlink_metadata(self.at(name)).is_ok()
    }

    fn ino(&self, name: &str) -> u64 {
        fs::symlink_metadata(self.at(name)).unwrap().ino()
    }

    /// Nothing that a command staged is left.
    fn end(self) {
        for top in [self.mount.root(), self.outside.as_path()] {
            let names = fs::read_dir(top).unwrap();
            for name in names.map(|entry| entry.unwrap().file_name()) {
                assert!(!name.to_string_lossy().starts_with(".ramet"), "{name:?}");
            }
        }
        self.mount.umount();
        self.bed.fsck();
    }
}

#[test]
fn swap_exchanges_whatever_the_kinds() {
    let place = Place::new();
    let (a, file) = (place.ino("a"), place.ino("file"));
    place.must(&["swap"], &["a", "file"]);
    assert_eq!((place.ino("file"), place.ino("a")), (a, file));
    assert_eq!(place.read("a"), "plain");
    assert_eq!(place.read("file/deep/file"), "of a");
    place.must(&["swap"], &["a", "file/"]);
    assert_eq!(place.ino("a"), a);
    place.must(&["swap"], &["link", "b/file"]);
    assert_eq!(place.read("link"), "of b");
    place.refuses(&["swap"], &["a", "a/deep"], "within the other");
    place.refuses(&["swap"], &["a", "a"], "same file");
    place.refuses(&["swap"], &["a", "none"], "no such file");
    place.refuses(&["swap"], &["a", "outside/a"], "not on a Ramet mount");
    assert_eq!(place.read("a/deep/file"), "of a");
    place.end();
}

#[test]
fn mv_renames_replaces_and_keeps_the_inode() {
    let place = Place::new();
    let a = place.ino("a");
    place.refuses(&["mv"], &["a", "b"], "'");
    assert!(place.has("a") && place.read("b/file") == "of b");
    place.must(&["mv"], &["a", "new"]);
    assert_eq!(place.ino("new"), a);
    // A directory that is not empty is replaced as a whole.
    place.must(&["mv", "--replace"], &["new", "b"]);
    assert_eq!(place.ino("b"), a);
    assert!(!place.has("new") && !place.has("b/file"));
    // Into a directory, several at once, and one that is missing among them.
    fs::create_dir(place.at("into")).unwrap();
    place.refuses(&["mv"], &["file", "none", "link", "into"], "no such file");
    assert_eq!(place.read("into/file"), "plain");
    assert!(place.has("into/link") && !place.has("link"));
    place.must(&["mv"], &["into/file", "b/"]);
    place.refuses(&["mv"], &["b", "b/deep/b"], "into itself");
    place.refuses(
        &["mv", "--replace"],
        &["b/file", "into"],
        "only a directory",
    );
    place.refuses(&["mv", "--replace"], &["into", "b/file"], "not a directory");
    place.refuses(&["mv", "--replace"], &["b", "b"], "source itself");
    place.end();
}

#[test]
fn mv_and_cp_tell_when_they_copy() {
    let place = Place::new();
    let told = "not on the mount of the destination";
    let said = place.must(&["cp"], &["outside/a", "copy"]);
    assert!(said.contains(told), "{said}");
    assert_eq!(place.read("copy/deep/file"), "of a");
    assert_eq!(place.read("outside/a/deep/file"), "of a");
    place.refuses(&["mv"], &["outside/a", "copy"], "already exists");
    assert!(place.has("outside/a"));
    let said = place.must(&["mv", "--replace"], &["outside/b", "copy"]);
    assert!(said.contains(told), "{said}");
    assert_eq!(place.read("copy/file"), "of b");
    assert!(!place.has("outside/b"));
    for name in ["file", "link"] {
        place.must(
            &["mv"],
            &[&format!("outside/{name}"), &format!("own {name}")],
        );
        assert!(!place.has(&format!("outside/{name}")));
    }
    assert_eq!(place.read("own file"), "plain");
    let target = fs::read_link(place.at("own link")).unwrap();
    assert_eq!(target, Path::new("nowhere"));
    place.refuses(&["mv"], &["a", "outside/x"], "not on a Ramet mount");
    place.refuses(&["cp"], &["a", "outside/x"], "not on a Ramet mount");
    assert!(place.has("a") && !place.has("outside/x"));
    place.end();
}

#[test]
fn cp_clones_many_sources_in_constant_space() {
    let place = Place::new();
    fs::write(place.at("a/large"), vec![7; 64 << 20]).unwrap();
    let before = place.mount.allocated_settled();
    fs::create_dir(place.at("into")).unwrap();
    let said = place.must(&["cp", "-r"], &["a", "b", "link", "into"]);
    assert_eq!(said, "");
    let grown = place.mount.allocated_settled() - before;
    assert!(grown < 1 << 20, "{grown} bytes for clones");
    assert_eq!(place.read("into/a/deep/file"), "of a");
    assert_eq!(place.read("into/b/file"), "of b");
    assert!(place.has("into/link"));
    place.refuses(&["cp", "-a"], &["a", "b", "into/"], "already exists");
    place.must(&["cp", "-a", "--replace"], &["b", "into/a"]);
    assert_eq!(place.read("into/a/file"), "of b");
    place.end();
}

#[test]
fn sources_of_one_name_do_not_replace_each_other() {
    let place = Place::new();
    for dir in ["into", "a/sub", "b/sub"] {
        fs::create_dir(place.at(dir)).unwrap();
    }
    fs::write(place.at("a/x"), "x of a").unwrap();
    fs::write(place.at("b/x"), "x of b").unwrap();
    fs::write(place.at("a/sub/file"), "sub of a").unwrap();
    fs::write(place.at("into/x"), "old").unwrap();
    let refuses = |verb: &str, paths: &[&str]| {
        place.refuses(&[verb, "--replace"], paths, "not replaced");
    };
    refuses("cp", &["a/x", "b/x", "a/sub", "b/sub", "into"]);
    assert_eq!(place.read("into/x"), "x of a");
    assert_eq!(place.read("into/sub/file"), "sub of a");
    // An object that an earlier command has put there is replaced.
    refuses("mv", &["b/x", "a/x", "into"]);
    assert_eq!(place.read("into/x"), "x of b");
    assert_eq!(place.read("a/x"), "x of a");
    assert!(!place.has("b/x"));
    refuses("mv", &["a/sub", "b/sub", "into/"]);
    assert_eq!(place.read("into/sub/file"), "sub of a");
    assert!(place.has("b/sub") && !place.has("a/sub"));
    // The same for sources that are copied. A source that fails is no hindrance.
    refuses("mv", &["outside/file", "file", "into"]);
    assert_eq!(place.read("into/file"), "plain");
    assert!(!place.has("outside/file") && place.has("file"));
    place.refuses(
        &["mv", "--replace"],
        &["b/none", "none", "file", "into"],
        "no such file",
    );
    assert!(!place.has("file"));
    place.end();
}

#[test]
fn a_link_that_is_put_in_the_way_of_a_copy_is_not_written_through() {
    let place = Place::new();
    let victim = place.outside.join("victim");
    fs::write(&victim, "kept").unwrap();
    // In the place of cp(1), which puts a link where the copy would go if that were beside the
    // destination, then copies, and tells the mode of the directory that it copied into.
    let programs = place.bed.path().join("programs");
    fs::create_dir(&programs).unwrap();
    let script = "#!/bin/sh\nfor to; do :; done\nln -s $VICTIM $BESIDE/${to##*/}\n\
                  stat -Lc %a ${to%/*} > $VICTIM.mode\nexec /bin/cp \"$@\"\n";
    fs::write(programs.join("cp"), script).unwrap();
    fs::set_permissions(programs.join("cp"), fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:/usr/bin:/bin", programs.display());
    std::os::unix::fs::symlink("file", place.outside.join("to-file")).unwrap();
    // A regular file has no name while it is copied, and a link has one.
    for (verb, source, dir_mode) in [
        ("cp", "file", "500\n"),
        ("cp", "to-file", "700\n"),
        ("mv", "to-file", "700\n"),
        ("mv", "file", "500\n"),
    ] {
        let mut command = std::process::Command::new(ramet_bin());
        command
            .arg(verb)
            .args([place.outside.join(source), place.at("copy")]);
        let all = [
            ("PATH", path.as_ref()),
            ("VICTIM", victim.as_path()),
            ("BESIDE", place.mount.root()),
        ];
        let out = command.args(["--replace"]).envs(all).output().unwrap();
        assert!(out.status.success(), "{out:?}");
        assert_eq!(fs::read_to_string(&victim).unwrap(), "kept");
        let mode = fs::read_to_string(place.outside.join("victim.mode")).unwrap();
        assert_eq!(mode, dir_mode, "{verb} {source}");
        match source {
            "file" => assert_eq!(place.read("copy"), "plain"),
            _ => assert_eq!(fs::read_link(place.at("copy")).unwrap(), Path::new("file")),
        }
        let names = fs::read_dir(place.mount.root()).unwrap();
        let names = names.map(|entry| entry.unwrap().path());
        let kept = [place.at("link"), place.at("copy")];
        for link in names.filter(|path| path.is_symlink() && !kept.contains(path)) {
            fs::remove_file(link).unwrap();
        }
    }
    // A copy that fails leaves nothing, and is told by the path that was given.
    fs::write(programs.join("cp"), "#!/bin/sh\nexec /bin/cp \"$@\" none\n").unwrap();
    let mut command = std::process::Command::new(ramet_bin());
    command
        .arg("cp")
        .args([place.at("outside/victim"), place.at("copy")]);
    let out = command.env("PATH", path).output().unwrap();
    assert!(
        String::from_utf8_lossy(&out.stderr).contains("not copied"),
        "{out:?}"
    );
    place.end();
}

#[test]
fn a_copy_of_a_file_that_is_killed_leaves_nothing() {
    let place = Place::new();
    // In the place of cp(1), which writes a part, says so, and waits.
    let programs = place.bed.path().join("programs");
    fs::create_dir(&programs).unwrap();
    let script = "#!/bin/sh\nfor to; do :; done\necho part > \"$to\"\n\
                  echo $$ > $PART.new\nmv $PART.new $PART\nexec sleep 600\n";
    fs::write(programs.join("cp"), script).unwrap();
    fs::set_permissions(programs.join("cp"), fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:/usr/bin:/bin", programs.display());
    let part = place.outside.join("part");
    let names = || {
        let names = fs::read_dir(place.mount.root()).unwrap();
        let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = names();
    for verb in ["cp", "mv"] {
        let mut command = std::process::Command::new(ramet_bin());
        command
            .arg(verb)
            .args([place.outside.join("file"), place.at("copy")]);
        let child = command.envs([("PATH", path.as_ref()), ("PART", part.as_path())]);
        let mut child = child.spawn().unwrap();
        until("no part was copied", || part.exists());
        child.kill().unwrap();
        child.wait().unwrap();
        let cp = fs::read_to_string(&part).unwrap();
        run_ok("kill", &["-9", cp.trim()]);
        fs::remove_file(&part).unwrap();
        assert_eq!(names(), before, "{verb}");
    }
    assert!(place.outside.join("file").exists());
    place.end();
}

#[test]
fn extended_attributes_that_a_copy_lacks_are_told() {
    let place = Place::new();
    let bin = place.bed.command_for_others();
    let into = place.at("into");
    fs::create_dir(&into).unwrap();
    for dir in [place.bed.path(), place.mount.root(), &place.outside] {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
    }
    std::os::unix::fs::chown(&into, Some(1234), Some(1234)).unwrap();
    for name in ["a/deep/file", "file"] {
        // Root alone may give attributes of this kind.
        let (path, flags) = (place.outside.join(name), rustix::fs::XattrFlags::empty());
        rustix::fs::setxattr(path, "security.ramet", b"x", flags).unwrap();
    }
    for (name, why) in [
        ("a", "1 extended attributes were left out"),
        ("file", "security.ramet"),
    ] {
        let mut command = std::process::Command::new("setpriv");
        command
            .args(["--reuid=1234", "--regid=1234", "--clear-groups"])
            .arg(&bin)
            .arg("cp")
            .args([place.outside.join(name), into.join(name)]);
        let out = command.output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && said.contains(why), "{said}");
    }
    assert_eq!(place.read("into/a/deep/file"), "of a");
    place.end();
}

#[test]
fn two_replacements_at_once_leave_no_tree_behind() {
    let place = Place::new();
    fs::create_dir(place.at("target")).unwrap();
    for _ in 0..30 {
        let start = |name: &str| {
            let paths = [place.outside.join(name), place.at("target")];
            let mut command = std::process::Command::new(ramet_bin());
            command.args(["cp", "--replace"]).args(paths);
            command.stderr(std::process::Stdio::null()).spawn().unwrap()
        };
        for mut copy in ["a", "b"].map(start) {
            assert!(copy.wait().unwrap().success());
        }
        let names = fs::read_dir(place.mount.root()).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name());
        let hidden = names.filter(|name| name.to_string_lossy().starts_with(".ramet-"));
        assert_eq!(hidden.collect::<Vec<_>>(), [""; 0]);
    }
    place.end();
}

#[test]
fn a_directory_with_the_name_of_standard_input_is_a_directory() {
    // The command stands in the folder that has the directory, and has an empty standard input.
    let place = Place::new();
    let dash = place.outside.join("-");
    fs::create_dir(&dash).unwrap();
    fs::write(dash.join("file"), "of the directory").unwrap();
    for (verb, name) in [("cp", "copied"), ("mv", "moved")] {
        let mut command = std::process::Command::new(ramet_bin());
        command.args([verb, "-"]).arg(place.at(name));
        command
            .current_dir(&place.outside)
            .stdin(std::process::Stdio::null());
        let out = command.output().unwrap();
        assert!(out.status.success(), "{out:?}");
        assert_eq!(place.read(&format!("{name}/file")), "of the directory");
    }
    assert!(!place.has("outside/-"));
    place.end();
}
