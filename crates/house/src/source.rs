//! A source file as code only: comments, strings and tests blanked, every byte at its old place.

/// `text` with comments, strings and characters replaced by spaces. Lines and offsets stay as they are.
#[must_use]
pub fn code(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = match bytes[at] {
            b'/' if bytes[at..].starts_with(b"//") => find(bytes, at, b"\n"),
            b'/' if bytes[at..].starts_with(b"/*") => find(bytes, at, b"*/") + 2,
            b'"' => string_end(bytes, at + 1),
            b'b' if bytes[at..].starts_with(b"b\"") => string_end(bytes, at + 2),
            b'r' | b'b' if raw_string(&bytes[at..]).is_some() => {
                let (open, hashes) = raw_string(&bytes[at..]).expect("just seen");
                let close = [b"\"".as_slice(), &vec![b'#'; hashes]].concat();
                find(bytes, at + open, &close) + close.len()
            }
            b'\'' if char_end(bytes, at) > at + 1 => char_end(bytes, at),
            byte if is_word(byte) => {
                at = word_end(bytes, at);
                continue;
            }
            _ => {
                at += 1;
                continue;
            }
        };
        let end = end.min(bytes.len());
        for byte in &mut out[at..end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at = end.max(at + 1);
    }
    String::from_utf8(out).expect("whole characters are replaced")
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

fn word_end(bytes: &[u8], at: usize) -> usize {
    let len = bytes[at..]
        .iter()
        .take_while(|&&byte| is_word(byte))
        .count();
    at + len
}

fn find(bytes: &[u8], from: usize, what: &[u8]) -> usize {
    let found = bytes[from..].windows(what.len()).position(|w| w == what);
    found.map_or(bytes.len(), |at| from + at)
}

fn string_end(bytes: &[u8], mut at: usize) -> usize {
    while at < bytes.len() && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    at + 1
}

/// Length of the opening and number of hashes, when a raw string begins here.
fn raw_string(bytes: &[u8]) -> Option<(usize, usize)> {
    let rest = bytes.strip_prefix(b"b").unwrap_or(bytes);
    let rest = rest.strip_prefix(b"r")?;
    let hashes = rest.iter().take_while(|&&byte| byte == b'#').count();
    (rest.get(hashes) == Some(&b'"')).then(|| (bytes.len() - rest.len() + hashes + 1, hashes))
}

/// Where the character ends that begins here; just behind the quote when it is a lifetime.
fn char_end(bytes: &[u8], at: usize) -> usize {
    if bytes.get(at + 1) == Some(&b'\\') {
        return find(bytes, at + 3, b"'") + 1;
    }
    let len = (1..=4).find(|len| bytes.get(at + 1 + len) == Some(&b'\''));
    match len {
        Some(len) if len == 1 || bytes[at + 1] >= 0x80 => at + len + 2,
        _ => at + 1,
    }
}

/// Where the bracket closes that opens at `at`.
#[must_use]
pub fn closing(code: &str, at: usize) -> usize {
    let bytes = code.as_bytes();
    let open = bytes[at];
    let close = match open {
        b'{' => b'}',
        b'(' => b')',
        _ => b']',
    };
    let mut depth = 0;
    for (n, &byte) in bytes.iter().enumerate().skip(at) {
        if byte == open {
            depth += 1;
        } else if byte == close {
            depth -= 1;
            if depth == 0 {
                return n;
            }
        }
    }
    bytes.len()
}

/// `code` without the items under `#[cfg(test)]`, and the modules in files of their own among them.
#[must_use]
pub fn without_tests(code: &str) -> (String, Vec<String>) {
    let mut out = code.as_bytes().to_vec();
    let mut modules = Vec::new();
    let mut at = 0;
    while let Some(found) = code[at..].find("#[cfg(") {
        let start = at + found;
        let attribute = closing(code, start + 1) + 1;
        at = attribute;
        let condition = &code[start..attribute];
        let is_without = condition.contains("not(test)") || condition.starts_with("#[cfg(not(");
        let is_test = tokens(condition).iter().any(|t| t.text == "test") && !is_without;
        if !is_test {
            continue;
        }
        let end = item_end(code, attribute);
        let item = tokens(&code[attribute..end]);
        let name = item.iter().skip_while(|t| t.text != "mod").nth(1);
        if let (Some(name), true) = (name, code[..end].ends_with(';')) {
            modules.push(name.text.to_owned());
        }
        for byte in &mut out[start..end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at = end;
    }
    let out = String::from_utf8(out).expect("whole characters are replaced");
    (out, modules)
}

/// Where the item ends that begins at `at`: behind its body, or its semicolon.
fn item_end(code: &str, mut at: usize) -> usize {
    let bytes = code.as_bytes();
    while at < bytes.len() {
        match bytes[at] {
            b'{' => return closing(code, at) + 1,
            b'(' | b'[' => at = closing(code, at),
            b';' => return at + 1,
            _ => {}
        }
        at += 1;
    }
    bytes.len()
}

/// A word, a `::`, or one other character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token<'a> {
    /// Its characters.
    pub text: &'a str,
    /// Where it begins.
    pub at: usize,
}

/// The tokens of blanked code.
#[must_use]
pub fn tokens(code: &str) -> Vec<Token<'_>> {
    let bytes = code.as_bytes();
    let mut found = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let end = if bytes[at].is_ascii_whitespace() {
            at += 1;
            continue;
        } else if is_word(bytes[at]) {
            word_end(bytes, at)
        } else if bytes[at..].starts_with(b"::") {
            at + 2
        } else {
            at + 1
        };
        let text = &code[at..end];
        found.push(Token { text, at });
        at = end;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_strings_and_characters_are_blanked_and_lifetimes_are_not() {
        let text =
            "let a = \"x // {\"; // }\nfn f<'a>(c: &'a str) { '{' } r#\"}\"# b\"{\" '\\'' 'é'";
        let code = code(text);
        assert_eq!(code.len(), text.len());
        assert!(code.contains("fn f<'a>(c: &'a str) {     }"), "{code}");
        assert_eq!(code.matches(['{', '}']).count(), 2);
    }

    #[test]
    fn tests_are_left_out_and_their_files_are_named() {
        let text = "fn a() {}\n#[cfg(test)]\nmod tests {\n use crate::b;\n}\n#[cfg(test)]\nmod far;\nfn c() {}";
        let (code, modules) = without_tests(text);
        assert!(!code.contains("crate::b") && code.contains("fn c()"));
        assert_eq!(modules, ["far"]);
    }
}
