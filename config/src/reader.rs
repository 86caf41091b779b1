//! A typed walk over a parsed document that writes a mistake down and goes on.
//!
//! serde stops at the first error; a file that is edited far from the machine it is for should not take ten attempts.

use core::cell::RefCell;
use core::fmt::Display;
use core::ops::{Range, RangeInclusive};
use core::time::Duration;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::report::Diagnostic;
use crate::units::{nearest, parse_duration, parse_size, show_duration, show_size};

/// A value, and where it stands.
#[derive(Clone, Debug)]
pub(crate) struct At<T> {
    pub(crate) value: T,
    /// Of the value; of its section's header, if it is a default.
    pub(crate) span: Range<usize>,
    /// Not a default.
    pub(crate) given: bool,
}

/// The mistakes so far.
#[derive(Debug, Default)]
pub(crate) struct Mistakes(RefCell<Vec<Diagnostic>>);

impl Mistakes {
    pub(crate) fn push(&self, diagnostic: Diagnostic) {
        self.0.borrow_mut().push(diagnostic);
    }

    pub(crate) fn into_inner(self) -> Vec<Diagnostic> {
        self.0.into_inner()
    }
}

/// What a value should have been.
#[derive(Debug)]
pub(crate) struct Wrong {
    /// Goes on from "`key` ": "must be a size", "is out of range".
    title: String,
    label: String,
    remedy: String,
    /// Where inside the value; else the whole of it.
    span: Option<Range<usize>>,
    /// Further items of the same array.
    others: Vec<Self>,
}

impl Wrong {
    pub(crate) fn new(
        title: impl Into<String>,
        label: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            title: title.into(),
            label: label.into(),
            remedy: remedy.into(),
            span: None,
            others: Vec::new(),
        }
    }

    /// A value of another type.
    pub(crate) fn kind(expected: &str, found: &DeValue<'_>, example: &str) -> Self {
        Self::new(
            format!("must be {expected}"),
            format!("this is {}", article(found.type_str())),
            format!("as in {example}"),
        )
    }
}

/// One table, and the keys that were asked of it.
#[derive(Debug)]
pub(crate) struct Section<'t> {
    /// As a person would write its header: `[node.copy]`.
    header: &'static str,
    table: &'t DeTable<'t>,
    span: Range<usize>,
    asked: Vec<&'static str>,
    /// Keys that must be there and are not.
    missing: Vec<(&'static str, Diagnostic)>,
    mistakes: &'t Mistakes,
}

impl<'t> Section<'t> {
    pub(crate) const fn new(
        header: &'static str,
        table: &'t DeTable<'t>,
        span: Range<usize>,
        mistakes: &'t Mistakes,
    ) -> Self {
        Self {
            header,
            table,
            span,
            asked: Vec::new(),
            missing: Vec::new(),
            mistakes,
        }
    }

    /// Where its header stands.
    pub(crate) fn span(&self) -> Range<usize> {
        self.span.clone()
    }

    /// Whether the key is there, whatever it holds. Counts as asked.
    pub(crate) fn has(&mut self, key: &'static str) -> bool {
        self.find(key).is_some()
    }

    /// A key that must be there. `None` if it is not, or is wrong: both are written down, the first by [`finish`](Self::finish).
    pub(crate) fn need<T>(
        &mut self,
        key: &'static str,
        example: &str,
        read: impl FnOnce(&DeValue<'t>) -> Result<T, Wrong>,
    ) -> Option<At<T>> {
        let Some(found) = self.find(key) else {
            let missing = Diagnostic::new(
                format!("{} has no `{key}`", self.header),
                self.span(),
                "",
                format!("add {key} = {example}"),
            );
            self.missing.push((key, missing));
            return None;
        };
        self.read(key, found, read)
    }

    /// A key with a default. `None` if what is there is wrong, which is written down.
    pub(crate) fn or<T>(
        &mut self,
        key: &'static str,
        default: T,
        read: impl FnOnce(&DeValue<'t>) -> Result<T, Wrong>,
    ) -> Option<At<T>> {
        match self.find(key) {
            Some(found) => self.read(key, found, read),
            None => Some(At {
                value: default,
                span: self.span(),
                given: false,
            }),
        }
    }

    /// A table, if it is there.
    pub(crate) fn table(
        &mut self,
        key: &'static str,
        header: &'static str,
        example: &str,
    ) -> Option<Self> {
        let found = self.find(key)?;
        match found.get_ref() {
            DeValue::Table(table) => Some(Section::new(header, table, found.span(), self.mistakes)),
            other => {
                self.mistakes.push(Diagnostic::new(
                    format!("`{key}` must be a table"),
                    found.span(),
                    format!("this is {}", article(other.type_str())),
                    format!("as in {example}"),
                ));
                None
            }
        }
    }

    /// An array of tables; empty if it is not there.
    pub(crate) fn tables(&mut self, key: &'static str, header: &'static str) -> Vec<Self> {
        let Some(found) = self.find(key) else {
            return Vec::new();
        };
        let wrong = |span: Range<usize>, found: &DeValue<'_>| {
            self.mistakes.push(Diagnostic::new(
                format!("`{key}` must be an array of tables"),
                span,
                format!("this is {}", article(found.type_str())),
                format!("write {header}, in double brackets, once for each"),
            ));
        };
        let DeValue::Array(array) = found.get_ref() else {
            wrong(found.span(), found.get_ref());
            return Vec::new();
        };
        let mut sections = Vec::new();
        for item in array {
            match item.get_ref() {
                DeValue::Table(table) => {
                    sections.push(Section::new(header, table, item.span(), self.mistakes));
                }
                other => wrong(item.span(), other),
            }
        }
        sections
    }

    /// Writes down every key that is missing, and every one that nobody asked for; of one that is misspelt, only that.
    /// `elsewhere` knows keys that are no mistake of spelling.
    pub(crate) fn finish(self, elsewhere: impl Fn(&str) -> Option<&'static str>) {
        let mut missing = self.missing;
        for (key, _) in self.table {
            let name: &str = key.get_ref();
            if self.asked.contains(&name) {
                continue;
            }
            let (label, remedy) = match (elsewhere(name), nearest(name, self.asked.iter().copied()))
            {
                (Some(why), _) => (String::new(), why.to_owned()),
                (None, Some(meant)) => {
                    missing.retain(|(key, _)| *key != meant);
                    (
                        format!("did you mean `{meant}`?"),
                        format!("{} knows {}", self.header, list(&self.asked)),
                    )
                }
                (None, None) => (
                    String::new(),
                    format!("{} knows {}", self.header, list(&self.asked)),
                ),
            };
            self.mistakes.push(Diagnostic::new(
                format!("{} has no key `{name}`", self.header),
                key.span(),
                label,
                remedy,
            ));
        }
        for (_, missing) in missing {
            self.mistakes.push(missing);
        }
    }

    fn find(&mut self, key: &'static str) -> Option<&'t Spanned<DeValue<'t>>> {
        if !self.asked.contains(&key) {
            self.asked.push(key);
        }
        self.table.get(key)
    }

    fn read<T>(
        &self,
        key: &str,
        found: &Spanned<DeValue<'t>>,
        read: impl FnOnce(&DeValue<'t>) -> Result<T, Wrong>,
    ) -> Option<At<T>> {
        match read(found.get_ref()) {
            Ok(value) => Some(At {
                value,
                span: found.span(),
                given: true,
            }),
            Err(mut first) => {
                let others = core::mem::take(&mut first.others);
                for wrong in core::iter::once(first).chain(others) {
                    self.mistakes.push(Diagnostic::new(
                        format!("`{key}` {}", wrong.title),
                        wrong.span.unwrap_or_else(|| found.span()),
                        wrong.label,
                        wrong.remedy,
                    ));
                }
                None
            }
        }
    }
}

/// A whole number within a range.
pub(crate) fn integer<T>(range: RangeInclusive<T>) -> impl Fn(&DeValue<'_>) -> Result<T, Wrong>
where
    T: TryFrom<i128> + PartialOrd + Display,
{
    move |found| {
        let example = range.start();
        let number =
            whole(found).ok_or_else(|| Wrong::kind("an integer", found, &format!("{example}")))?;
        T::try_from(number)
            .ok()
            .filter(|number| range.contains(number))
            .ok_or_else(|| {
                let least = range.start();
                let low = T::try_from(number).map_or(number < 0, |number| number < *least);
                out_of_range(low, least, range.end())
            })
    }
}

/// 64 bits: a number, or a string for those that TOML's signed integers do not hold.
pub(crate) fn bits(found: &DeValue<'_>) -> Result<u64, Wrong> {
    let number = match found {
        DeValue::String(text) => {
            let text = text.replace('_', "");
            match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
                Some(hex) if !hex.starts_with('+') => u64::from_str_radix(hex, 16).ok(),
                Some(_) => None,
                None => text.parse().ok(),
            }
        }
        other => match whole(other) {
            Some(number) => u64::try_from(number).ok(),
            None => {
                return Err(Wrong::kind(
                    "64 bits",
                    found,
                    "0x1 or \"0xffff000000000001\"",
                ));
            }
        },
    };
    number.ok_or_else(|| {
        Wrong::new(
            "is not 64 bits",
            "0 to 0xffffffffffffffff",
            "as in 0x1 or \"0xffff000000000001\"",
        )
    })
}

/// A number within a range; `1` is as good as `1.0`.
pub(crate) fn number(range: RangeInclusive<f64>) -> impl Fn(&DeValue<'_>) -> Result<f64, Wrong> {
    move |found| {
        let text = match found {
            DeValue::Float(float) => float.as_str(),
            DeValue::Integer(integer) if integer.radix() == 10 => integer.as_str(),
            _ => return Err(Wrong::kind("a number", found, "0.5")),
        };
        match text.parse() {
            Ok(number) if range.contains(&number) => Ok(number),
            Ok(number) => Err(out_of_range(
                number < *range.start(),
                range.start(),
                range.end(),
            )),
            Err(_) => Err(Wrong::kind("a number", found, "0.5")),
        }
    }
}

/// A size in bytes, at least 1 and at most `most`.
pub(crate) fn size(most: u64) -> impl Fn(&DeValue<'_>) -> Result<u64, Wrong> {
    move |found| {
        let example = "\"64 KiB\" or 65536";
        let bytes = match found {
            DeValue::String(text) => parse_size(text).ok_or_else(|| {
                Wrong::new(
                    "is not a size",
                    "a whole number and B, KiB, MiB, GiB or TiB",
                    format!("as in {example}"),
                )
            })?,
            other => match whole(other).map(u64::try_from) {
                Some(Ok(bytes)) => bytes,
                Some(Err(_)) => return Err(out_of_range(true, &1, &show_size(most))),
                None => return Err(Wrong::kind("a size", found, example)),
            },
        };
        match bytes {
            0 => Err(Wrong::new("is zero", "", format!("give a size, {example}"))),
            bytes if bytes > most => Err(Wrong::new(
                "is too large",
                format!("{}, the most is {}", show_size(bytes), show_size(most)),
                format!("make it {} or less", show_size(most)),
            )),
            bytes => Ok(bytes),
        }
    }
}

/// A duration; a number without a unit is seconds, as in ko2iblnd.
pub(crate) fn duration(
    range: RangeInclusive<Duration>,
) -> impl Fn(&DeValue<'_>) -> Result<Duration, Wrong> {
    move |found| {
        let example = "\"50s\", \"500ms\", or 50 for seconds";
        let span = match found {
            DeValue::String(text) => parse_duration(text).ok_or_else(|| {
                Wrong::new(
                    "is not a duration",
                    "a whole number and us, ms, s, min or h",
                    format!("as in {example}"),
                )
            })?,
            other => match whole(other) {
                Some(seconds) => {
                    Duration::from_secs(u64::try_from(seconds).unwrap_or(if seconds < 0 {
                        0
                    } else {
                        u64::MAX
                    }))
                }
                None => return Err(Wrong::kind("a duration", found, example)),
            },
        };
        if range.contains(&span) {
            Ok(span)
        } else {
            Err(out_of_range(
                span < *range.start(),
                &show_duration(*range.start()),
                &show_duration(*range.end()),
            ))
        }
    }
}

/// One word out of a list.
pub(crate) fn choice<T: Copy>(
    words: &[(&'static str, T)],
) -> impl Fn(&DeValue<'_>) -> Result<T, Wrong> {
    move |found| {
        let names: Vec<&str> = words.iter().map(|(name, _)| *name).collect();
        let quoted: Vec<String> = names.iter().map(|name| format!("\"{name}\"")).collect();
        let one_of = format!("one of {}", quoted.join(", "));
        let DeValue::String(text) = found else {
            return Err(Wrong::kind(
                &one_of,
                found,
                quoted.first().map_or("", |first| first),
            ));
        };
        words
            .iter()
            .find(|(name, _)| name == text)
            .map(|(_, value)| *value)
            .ok_or_else(|| {
                let label = nearest(text, names.iter().copied())
                    .map_or_else(String::new, |meant| format!("did you mean \"{meant}\"?"));
                Wrong::new(format!("cannot be \"{text}\""), label, one_of)
            })
    }
}

/// True or false.
pub(crate) fn boolean(found: &DeValue<'_>) -> Result<bool, Wrong> {
    match found {
        DeValue::Boolean(value) => Ok(*value),
        other => Err(Wrong::kind("true or false", other, "true, without quotes")),
    }
}

/// A string that is not empty.
pub(crate) fn string(found: &DeValue<'_>) -> Result<String, Wrong> {
    match found {
        DeValue::String(text) if text.is_empty() => Err(Wrong::new(
            "is empty",
            "",
            "write something between the quotes",
        )),
        DeValue::String(text) => Ok(text.clone().into_owned()),
        other => Err(Wrong::kind("a string", other, "\"scratch\"")),
    }
}

/// A list that is not empty. Every wrong item is told of.
pub(crate) fn array<T>(
    item: impl Fn(&DeValue<'_>) -> Result<T, Wrong>,
    example: &'static str,
) -> impl Fn(&DeValue<'_>) -> Result<Vec<At<T>>, Wrong> {
    move |found| {
        let DeValue::Array(items) = found else {
            return Err(Wrong::kind("an array", found, example));
        };
        if items.is_empty() {
            return Err(Wrong::new("is empty", "", format!("as in {example}")));
        }
        let mut values = Vec::new();
        let mut wrongs = Vec::new();
        for found in items {
            match item(found.get_ref()) {
                Ok(value) => values.push(At {
                    value,
                    span: found.span(),
                    given: true,
                }),
                Err(wrong) => wrongs.push(Wrong {
                    title: format!("has an item that {}", wrong.title),
                    span: Some(found.span()),
                    ..wrong
                }),
            }
        }
        let mut wrongs = wrongs.into_iter();
        match wrongs.next() {
            None => Ok(values),
            Some(first) => Err(Wrong {
                others: wrongs.collect(),
                ..first
            }),
        }
    }
}

fn whole(found: &DeValue<'_>) -> Option<i128> {
    let DeValue::Integer(integer) = found else {
        return None;
    };
    // More digits than i128 holds are still a number, far out of any range.
    let far = if integer.as_str().starts_with('-') {
        i128::MIN
    } else {
        i128::MAX
    };
    Some(i128::from_str_radix(integer.as_str(), integer.radix()).unwrap_or(far))
}

fn out_of_range(low: bool, least: &impl Display, most: &impl Display) -> Wrong {
    Wrong::new(
        "is out of range",
        if low {
            format!("less than {least}")
        } else {
            format!("more than {most}")
        },
        format!("choose a value from {least} to {most}"),
    )
}

fn article(kind: &str) -> String {
    let an = kind.starts_with(['a', 'e', 'i', 'o', 'u']);
    format!("{} {kind}", if an { "an" } else { "a" })
}

fn list(words: &[&str]) -> String {
    words.join(", ")
}
