//! Fields of the text files under `/proc`.

use std::fs;
use std::io;

/// The value of the line `name: value`, without surrounding blanks.
pub(crate) fn field<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

/// The number at the start of such a value.
pub(crate) fn number(text: &str, name: &str) -> Option<u64> {
    field(text, name)?.split_whitespace().next()?.parse().ok()
}

/// `/proc/thread-self/status`: the calling thread.
pub(crate) fn thread_status() -> io::Result<String> {
    fs::read_to_string("/proc/thread-self/status")
}

#[cfg(test)]
mod tests {
    use super::{field, number, thread_status};

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "MemTotal:  24 kB\nMemAvailable:   7 kB\nflags\t\t: a b\n";
        assert_eq!(number(text, "MemAvailable"), Some(7));
        assert_eq!(field(text, "flags"), Some("a b"));
        assert_eq!(number(text, "Mem"), None);
        assert_eq!(number(text, "flags"), None);
        assert!(number(&thread_status().unwrap(), "Pid").unwrap() > 0);
    }
}
