//! `ramet-package DIR`: writes the files of a package of Ramet besides the command. The command
//! line's own description gives the manual pages in `DIR/man` and the completions for shells in
//! `DIR/completions`.
//!
//! A page of a command has its description, options and subcommands, and then the sections of
//! `man/`, which are written by hand: examples, files, exit statuses. `ramet.5` is written by hand
//! as a whole. The daemon does not link this crate.
#![forbid(unsafe_code)]

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Arg, Command, Parser};
use clap_complete::Shell;
use clap_mangen::Man;

/// Sections that follow the generated ones of a page.
const SECTIONS: [(&str, &str); 6] = [
    ("ramet.1", include_str!("../man/ramet.1.roff")),
    ("ramet-mount.1", include_str!("../man/mount.roff")),
    ("mount.ramet.8", include_str!("../man/mount.roff")),
    ("umount.ramet.8", include_str!("../man/umount.ramet.8.roff")),
    ("mkfs.ramet.8", include_str!("../man/mkfs.ramet.8.roff")),
    ("fsck.ramet.8", include_str!("../man/fsck.ramet.8.roff")),
];
/// The page of the format.
const FORMAT: (&str, &str) = ("ramet.5", include_str!("../man/ramet.5"));
/// Names that stand for another page.
const ALIASES: [(&str, &str); 2] = [
    ("mount.fuse.ramet.8", "man8/mount.ramet.8"),
    ("umount.fuse.ramet.8", "man8/umount.ramet.8"),
];

/// Write the manual pages of Ramet and its completions for shells
#[derive(Debug, Parser)]
struct Args {
    /// Directory to write to
    dir: PathBuf,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match write_all(&args.dir) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ramet-package: {}: {error}", args.dir.display());
            ExitCode::FAILURE
        }
    }
}

fn write_all(dir: &Path) -> io::Result<()> {
    let (man, completions) = (dir.join("man"), dir.join("completions"));
    fs::create_dir_all(&man)?;
    fs::create_dir_all(&completions)?;
    for (name, text) in pages()? {
        fs::write(man.join(name), text)?;
    }
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut rametfs::command(), "ramet", &completions)?;
    }
    Ok(())
}

/// All pages, by the name of their file.
fn pages() -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut pages = Vec::new();
    let mut ramet = rametfs::command().disable_help_subcommand(true);
    ramet.build();
    for verb in ramet.get_subcommands() {
        for inner in verb.get_subcommands() {
            pages.push(page(inner.clone(), "1")?);
        }
        pages.push(page(verb.clone(), "1")?);
    }
    pages.push(page(ramet, "1")?);
    for name in rametfs::commands_of_names() {
        pages.push(page(name, "8")?);
    }
    pages.push((FORMAT.0.into(), FORMAT.1.into()));
    for (name, page) in ALIASES {
        pages.push((name.into(), format!(".so {page}\n").into_bytes()));
    }
    Ok(pages)
}

/// The page of one command.
fn page(command: Command, section: &str) -> io::Result<(String, Vec<u8>)> {
    let name = command.get_display_name().unwrap_or(command.get_name());
    let (name, has_verbs) = (name.to_owned(), command.has_subcommands());
    let file = format!("{name}.{section}");
    let opening = [synopsis(command.clone()), description(&command)].concat();
    let arguments: Vec<_> = command.get_arguments().cloned().collect();
    let man = Man::new(command)
        .title(name.to_uppercase())
        .section(section)
        .date("")
        .source(concat!("Ramet ", env!("CARGO_PKG_VERSION")))
        .manual("Ramet");
    let mut text = Vec::new();
    man.render_title(&mut text)?;
    man.render_name_section(&mut text)?;
    text.extend_from_slice(opening.as_bytes());
    let mut options = Vec::new();
    man.render_options_section(&mut options)?;
    text.extend_from_slice(&with_aliases(options, &arguments)?);
    if has_verbs {
        man.render_subcommands_section(&mut text)?;
    }
    match SECTIONS.iter().find(|(of, _)| *of == file) {
        Some((_, sections)) => text.extend_from_slice(sections.as_bytes()),
        None => text.extend_from_slice(b".SH SEE ALSO\n.BR ramet (1)\n"),
    }
    Ok((file, text))
}

/// The section with the usage of a command: its name and the words that stand for themselves in
/// bold, and the words that a user replaces in italics.
fn synopsis(mut command: Command) -> String {
    let usage = command.render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ");
    let is_replaced = |word: &str| word.contains(['<', '[']);
    let (mut parts, mut literal) = (Vec::new(), Vec::new());
    let bold = |words: &mut Vec<String>| {
        (!words.is_empty()).then(|| format!("\\fB{}\\fR", std::mem::take(words).join(" ")))
    };
    for word in usage.split_whitespace() {
        if is_replaced(word) {
            parts.extend(bold(&mut literal));
            let word = escaped(word).replace('<', r"\fI").replace('>', r"\fR");
            parts.push(word.replace("OPTIONS", r"\fIOPTIONS\fR"));
        } else {
            literal.push(escaped(word));
        }
    }
    parts.extend(bold(&mut literal));
    format!(".SH SYNOPSIS\n{}\n", parts.join(" "))
}

/// The section that describes a command, without the line that is its name section already.
fn description(command: &Command) -> String {
    let text = |text: Option<&clap::builder::StyledStr>| text.map(ToString::to_string);
    let about = text(command.get_about()).unwrap_or_default();
    let long = text(command.get_long_about()).unwrap_or_default();
    let long = long.strip_prefix(&about).unwrap_or(&long).trim();
    let shown = if long.is_empty() {
        format!("{about}.")
    } else {
        long.to_owned()
    };
    let paragraphs: Vec<_> = shown.split("\n\n").map(escaped).collect();
    format!(".SH DESCRIPTION\n{}\n", paragraphs.join("\n.PP\n"))
}

/// The section of the options, with the other short and long names that an option shows: the
/// renderer leaves them out.
fn with_aliases(options: Vec<u8>, arguments: &[Arg]) -> io::Result<Vec<u8>> {
    let mut text = String::from_utf8(options).map_err(io::Error::other)?;
    let short = |name: char| format!(r"\fB\-{name}\fR");
    let long = |name: &str| format!(r"\fB\-\-{}\fR", escaped(name));
    for argument in arguments {
        let names = argument.get_short().map(short).into_iter();
        let names: Vec<_> = names.chain(argument.get_long().map(long)).collect();
        let shorts = argument.get_visible_short_aliases().unwrap_or_default();
        let longs = argument.get_visible_aliases().unwrap_or_default();
        let others = shorts
            .into_iter()
            .map(short)
            .chain(longs.into_iter().map(long));
        let others: Vec<_> = others.collect();
        if others.is_empty() {
            continue;
        }
        let tag = format!("\n.TP\n{}", names.join(", "));
        if text.matches(&tag).count() != 1 {
            return Err(io::Error::other(format!("no place for {others:?}")));
        }
        text = text.replacen(&tag, &format!("{tag}, {}", others.join(", ")), 1);
    }
    Ok(text.into_bytes())
}

/// Text in which roff sees no command and no hyphen that it may break at.
fn escaped(text: &str) -> String {
    let line = |line: &str| match line.replace('\\', r"\e").replace('-', r"\-") {
        line if line.starts_with(['.', '\'']) => format!(r"\&{line}"),
        line => line,
    };
    let lines: Vec<_> = text.lines().map(line).collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_of(file: &str) -> String {
        let (_, text) = pages()
            .unwrap()
            .into_iter()
            .find(|(name, _)| name == file)
            .unwrap_or_else(|| panic!("no {file}"));
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn every_verb_and_every_name_has_a_page() {
        let names: Vec<String> = pages().unwrap().into_iter().map(|(name, _)| name).collect();
        for verb in rametfs::command().get_subcommands() {
            let page = format!("ramet-{}.1", verb.get_name());
            assert!(names.contains(&page), "{page}");
        }
        for page in ["ramet.1", "ramet.5", "mkfs.ramet.8", "mount.fuse.ramet.8"] {
            assert!(names.iter().any(|name| name == page), "{page}");
        }
        for (of, _) in SECTIONS {
            assert!(names.iter().any(|name| name == of), "{of} is no page");
        }
    }

    #[test]
    fn pages_name_their_command_once() {
        for (name, text) in pages().unwrap() {
            let text = String::from_utf8(text).unwrap();
            if text.starts_with(".so ") {
                continue;
            }
            let called = name.rsplit_once('.').unwrap().0.replace('-', "\\-");
            assert_eq!(text.matches("\n.SH NAME\n").count(), 1, "{name}");
            assert!(text.contains(&format!("\n{called} \\- ")), "{name}");
        }
    }

    #[test]
    fn synopsis_names_every_argument_and_the_description_does_not_repeat_the_name() {
        let text = text_of("ramet-mount.1");
        let synopsis = r"\fBramet mount\fR [\fIOPTIONS\fR] [VOLUME] [DIR]";
        assert!(text.contains(&format!("\n{synopsis}\n")), "{text}");
        assert_eq!(text.matches("Mount a volume on a directory").count(), 1);
        assert_eq!(escaped(".so x\na-b\\"), "\\&.so x\na\\-b\\e");
    }

    #[test]
    fn synopsis_is_the_usage_of_the_command() {
        let mut ramet = rametfs::command().disable_help_subcommand(true);
        ramet.build();
        let verbs = ramet.get_subcommands();
        let all = verbs.flat_map(|verb| [verb].into_iter().chain(verb.get_subcommands()));
        for command in all {
            let name = command.get_display_name().unwrap();
            let text = text_of(&format!("{name}.1"));
            let (_, shown) = text.split_once(".SH SYNOPSIS\n").unwrap();
            let (shown, _) = shown.split_once('\n').unwrap();
            let fonts = [r"\fB", r"\fI", r"\fR"];
            let plain = fonts
                .iter()
                .fold(shown.to_owned(), |text, font| text.replace(font, ""));
            let usage = command.clone().render_usage().to_string();
            let usage = usage.trim_start_matches("Usage: ").replace(['<', '>'], "");
            assert_eq!(plain.replace(r"\-", "-"), usage);
        }
    }

    /// All commands that have a page made of their command line, with the name of its file.
    fn commands() -> Vec<(Command, String)> {
        let mut ramet = rametfs::command().disable_help_subcommand(true);
        ramet.build();
        let verbs = ramet.get_subcommands();
        let all = verbs.flat_map(|verb| [verb].into_iter().chain(verb.get_subcommands()));
        let all = all.map(|command| (command.clone(), "1"));
        let names = rametfs::commands_of_names().into_iter();
        let named = |(command, section): (Command, &str)| {
            let name = command.get_display_name().unwrap_or(command.get_name());
            let file = format!("{name}.{section}");
            (command, file)
        };
        all.chain(names.map(|name| (name, "8")))
            .map(named)
            .collect()
    }

    #[test]
    fn pages_show_all_names_of_an_option() {
        let mut count = 0;
        for (command, file) in commands() {
            let text = text_of(&file);
            for argument in command.get_arguments() {
                for other in argument.get_visible_short_aliases().unwrap_or_default() {
                    let shown = format!(r", \fB\-{other}\fR");
                    assert!(text.contains(&shown), "{file} lacks -{other}");
                    count += 1;
                }
            }
        }
        assert!(count >= 4, "{count}");
    }

    #[test]
    fn pages_tell_the_exit_statuses_that_differ() {
        for (verb, statuses) in [
            ("cp", &["1", "2"][..]),
            ("mv", &["1", "2"]),
            ("export", &["1", "2"]),
            ("try", &["125", "126", "127", "2"]),
            ("enter", &["125", "126", "127", "2"]),
            ("merge", &["1", "2"]),
            ("refresh", &["1", "2"]),
            ("diff", &["0", "1", "2"]),
            ("fsck", &["0", "1", "4", "8", "16"]),
            ("scrub", &["0", "1", "4", "8", "16"]),
        ] {
            let text = text_of(&format!("ramet-{verb}.1")).replace('\n', " ");
            let (_, told) = text
                .split_once("exit status is")
                .unwrap_or_else(|| panic!("{verb}"));
            let told = told.split(".SH").next().unwrap();
            let words: Vec<_> = told.split(|c: char| !c.is_alphanumeric()).collect();
            for status in statuses {
                assert!(words.contains(status), "{verb}: {status}");
            }
        }
    }

    #[test]
    fn pages_of_commands_that_make_a_name_tell_that_they_replace_nothing() {
        for verb in ["clone", "cp", "mv", "restore"] {
            let text = text_of(&format!("ramet-{verb}.1"));
            let (_, text) = text.split_once(".SH DESCRIPTION").unwrap();
            let told = text.split(".SH").next().unwrap().replace('\n', " ");
            let told = told.contains(r"is a refusal, unless \-\-replace is given");
            assert!(told, "{verb}");
        }
    }

    #[test]
    fn lines_of_fstab_have_image_files_checked_by_nobody() {
        let text = text_of("mount.ramet.8");
        let lines = text.lines().map(|line| line.split_whitespace().collect());
        let lines = lines.filter(|words: &Vec<_>| words.len() == 6 && words[2] == "ramet");
        let lines: Vec<_> = lines.collect();
        assert!(lines.len() >= 3, "{lines:?}");
        for line in lines {
            assert!(line[0].starts_with("/dev/") || line[5] == "0", "{line:?}");
        }
    }

    #[test]
    fn every_page_that_a_page_refers_to_is_there() {
        let pages = pages().unwrap();
        let mut count = 0;
        for (of, text) in &pages {
            let text = String::from_utf8_lossy(text).replace("\\-", "-");
            let words = text.split(|c: char| !(c.is_alphanumeric() || "-.()".contains(c)));
            // `name(1)` as one word; `.BR name (1)` as two.
            let words: Vec<_> = words.filter(|word| !word.is_empty()).collect();
            let pairs = words.windows(2).filter(|two| two[1].starts_with('('));
            let joined = pairs.map(|two| two.concat());
            for word in words.iter().map(|word| (*word).to_owned()).chain(joined) {
                let word = word.trim_end_matches('.');
                let Some((name, section)) = word.split_once('(') else {
                    continue;
                };
                let section = section.trim_end_matches([')', '.']);
                let is_ours = name.split(['-', '.']).any(|part| part == "ramet");
                if is_ours && matches!(section, "1" | "5" | "8") {
                    let file = format!("{name}.{section}");
                    assert!(pages.iter().any(|(page, _)| *page == file), "{of}: {word}");
                    count += 1;
                }
            }
        }
        assert!(count > 40, "{count}");
    }

    #[test]
    fn every_mount_option_that_the_manual_names_is_accepted() {
        let text = text_of("mount.ramet.8");
        let options = text.split(".SH MOUNT OPTIONS").nth(1).expect("it is there");
        let options = options.split(".SH ").next().expect("a first part");
        let mut count = 0;
        let mut before = "";
        for line in options.lines() {
            let is_tag = matches!(before, ".TP" | ".TQ");
            before = line;
            let option = match line.split_once(' ') {
                Some((".B", option)) if is_tag => option.replace("\\-", "-"),
                Some((".BI", option)) if is_tag => match option.split_once(' ').expect("a value") {
                    (name, "CODEC") => format!("{name}lz4"),
                    (name, _) => format!("{name}1"),
                },
                _ => continue,
            };
            assert!(rametfs::is_mount_option(&option), "{option}");
            count += 1;
        }
        assert!(count > 15, "{count}");
    }

    #[test]
    fn fields_of_the_superblock_lie_where_the_format_says() {
        let format = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/format.md");
        let format = fs::read_to_string(format).unwrap();
        let page = text_of("ramet.5");
        let table = page.split(".SS Superblock").nth(1).unwrap();
        let rows = table.split(".TE").next().unwrap().lines();
        let is_number = |text: &str| text.parse::<u32>().is_ok();
        let rows = rows.map(|row| row.split('\t').collect::<Vec<_>>());
        let fields: Vec<_> = rows.filter(|row| is_number(row[0])).collect();
        assert!(fields.len() > 10, "{fields:?}");
        for field in fields {
            let (row, word) = (format!("| {} | {} | ", field[0], field[1]), field[2]);
            let (_, rest) = format
                .split_once(&row)
                .unwrap_or_else(|| panic!("{field:?}"));
            let name = rest.split(" |").next().unwrap().replace('_', " ");
            let begins = |text: &str| text.split([' ', ':', ';']).next().unwrap().to_lowercase();
            // Words for people, where the format has names for programs.
            let is_other = matches!(field[0], "8" | "48");
            assert!(
                is_other || begins(&name) == begins(word),
                "{name} and {word}"
            );
        }
    }

    #[test]
    fn completions_know_the_verbs() {
        let dir = tempfile::tempdir().unwrap();
        write_all(dir.path()).unwrap();
        for file in ["ramet.bash", "_ramet", "ramet.fish"] {
            let text = fs::read_to_string(dir.path().join("completions").join(file)).unwrap();
            assert!(text.contains("scrub"), "{file}");
        }
    }
}
