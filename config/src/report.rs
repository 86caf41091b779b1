//! Everything that is wrong with a node file, shown where it stands.

use core::error::Error;
use core::fmt;
use core::ops::Range;
use std::path::{Path, PathBuf};

use annotate_snippets::renderer::DecorStyle;
use annotate_snippets::{AnnotationKind, Group, Level, Origin, Renderer, Snippet};
use toml::de::DeTable;

/// Every mistake of one node file, in the order of its lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    origin: PathBuf,
    text: String,
    diagnostics: Vec<Diagnostic>,
}

/// One mistake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// What is wrong.
    pub title: String,
    /// Where; the first mark is the place to change. Empty where the file could not be read.
    pub marks: Vec<Mark>,
    /// What to do about it.
    pub remedy: String,
}

/// A place in the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Bytes of the text.
    pub span: Range<usize>,
    /// What is to be said beside the caret; may be empty.
    pub label: String,
}

impl Report {
    /// Sorts by place.
    pub(crate) fn new(origin: &Path, text: &str, mut diagnostics: Vec<Diagnostic>) -> Self {
        diagnostics.sort_by_key(|diagnostic| diagnostic.marks.first().map(|mark| mark.span.start));
        Self {
            origin: origin.to_owned(),
            text: text.to_owned(),
            diagnostics,
        }
    }

    /// The file they are about.
    #[must_use]
    pub fn origin(&self) -> &Path {
        &self.origin
    }

    /// At least one.
    #[must_use]
    pub fn diagnostics(&self) -> &[Diagnostic] {
        &self.diagnostics
    }

    /// Each with file, line, caret and remedy, and a last line that counts them. With terminal colours
    /// where `color` is set.
    #[must_use]
    pub fn render(&self, color: bool) -> String {
        let renderer = if color {
            Renderer::styled()
        } else {
            Renderer::plain()
        }
        .decor_style(DecorStyle::Ascii);
        let origin = self.origin.display().to_string();
        let mut out = String::new();
        for diagnostic in self.diagnostics.iter().take(MOST_SHOWN) {
            out.push_str(&renderer.render(&[self.group(&origin, diagnostic)]));
            out.push_str("\n\n");
        }
        let count = self.diagnostics.len();
        let noun = if count == 1 { "mistake" } else { "mistakes" };
        let cut = if count > MOST_SHOWN {
            ", of which these are the first"
        } else {
            ""
        };
        out.push_str(&format!("{origin}: {count} {noun}{cut}\n"));
        out
    }

    fn group<'a>(&'a self, origin: &'a str, diagnostic: &'a Diagnostic) -> Group<'a> {
        let title = Level::ERROR.primary_title(diagnostic.title.as_str());
        let group = if diagnostic.marks.is_empty() {
            title.element(Origin::path(origin))
        } else {
            let mut snippet = Snippet::source(self.text.as_str()).path(origin);
            for (i, mark) in diagnostic.marks.iter().enumerate() {
                let kind = if i == 0 {
                    AnnotationKind::Primary
                } else {
                    AnnotationKind::Context
                };
                let label = (!mark.label.is_empty()).then_some(mark.label.as_str());
                snippet = snippet.annotation(kind.span(self.clip(&mark.span)).label(label));
            }
            title.element(snippet)
        };
        if diagnostic.remedy.is_empty() {
            group
        } else {
            group.element(Level::HELP.message(diagnostic.remedy.as_str()))
        }
    }

    /// The span within the text, on character boundaries, and at most its first line: a caret under
    /// ten lines says less than one under the first.
    fn clip(&self, span: &Range<usize>) -> Range<usize> {
        let boundary = |at: usize| {
            (0..=at.min(self.text.len()))
                .rev()
                .find(|at| self.text.is_char_boundary(*at))
                .unwrap_or(0)
        };
        let start = boundary(span.start);
        let end = boundary(span.end).max(start);
        let inside = self.text.get(start..end).unwrap_or("");
        let line = inside.find('\n').unwrap_or(inside.len());
        start..start.saturating_add(line)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false))
    }
}

impl Error for Report {}

impl Diagnostic {
    pub(crate) fn new(
        title: impl Into<String>,
        span: Range<usize>,
        label: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            title: title.into(),
            marks: vec![Mark {
                span,
                label: label.into(),
            }],
            remedy: remedy.into(),
        }
    }

    /// Points at a second place.
    pub(crate) fn and(mut self, span: Range<usize>, label: impl Into<String>) -> Self {
        self.marks.push(Mark {
            span,
            label: label.into(),
        });
        self
    }

    /// Points at a second place, where there is one.
    pub(crate) fn and_if(self, there: bool, span: &Range<usize>, label: &str) -> Self {
        if there {
            self.and(span.clone(), label)
        } else {
            self
        }
    }
}

/// What the TOML parser says of a text that is not TOML.
///
/// A parser that goes on by itself mostly finds the echo of its first error. So the line with the error is
/// blanked and the rest is parsed again, until what is found next may follow from what was found before.
pub(crate) fn syntax(text: &str) -> Vec<Diagnostic> {
    let mut rest = text.to_owned();
    let mut diagnostics = Vec::new();
    let mut checked = 0;
    loop {
        // `DeTable::parse` alone would tell the last one.
        let (_, errors) = DeTable::parse_recoverable(&rest);
        let begins = |error: &toml::de::Error| error.span().map_or(0, |span| span.start);
        let Some(error) = errors.iter().min_by_key(|error| begins(error)) else {
            break;
        };
        let span = error.span().unwrap_or(0..0);
        let begin = rest
            .get(..span.start)
            .and_then(|before| before.rfind('\n'))
            .map_or(0, |newline| newline.saturating_add(1));
        let end = rest
            .get(begin..)
            .and_then(|line| line.find('\n'))
            .map_or(rest.len(), |length| begin.saturating_add(length));
        let line = rest.get(begin..end).unwrap_or("");
        // An array or string that is never closed reaches into the next line, and the one after that.
        let between = rest.get(checked..begin).unwrap_or("");
        if !diagnostics.is_empty() && between.trim().is_empty() {
            break;
        }
        diagnostics.push(Diagnostic::new(
            format!("not TOML: {}", error.message()),
            span,
            "",
            if error.message().contains("duplicate") {
                "a key stands once in its table; another node or export begins with its own [[ ]]"
            } else {
                "strings stand in quotes, arrays end with ], tables stand in [ ] and those of an array in [[ ]]"
            },
        ));
        // Without its header, the keys below would be taken for another table's.
        if line.trim_start().starts_with('[') || diagnostics.len() >= MOST_SHOWN {
            break;
        }
        rest.replace_range(begin..end, &" ".repeat(end.saturating_sub(begin)));
        checked = end;
    }
    diagnostics
}

/// More than this nobody reads, and each is drawn from the whole text.
const MOST_SHOWN: usize = 100;
