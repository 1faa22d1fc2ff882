//! Makes the manual pages of section 3: the synopsis from the header `pvm3.h`, the rest from the
//! reference of the C interface.

use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Date of the pages, as `mdoc` writes it: that of the reference.
const PAGE_DATE: &str = "November 30, 2026";

/// Functions of the reference that are described together.
#[derive(Debug)]
struct Entry {
    /// Title of the part of the reference.
    subject: String,
    names: Vec<String>,
    description: String,
    /// Error codes, each with its condition.
    errors: Vec<(String, String)>,
}

/// A prototype of the header, in one line and without its semicolon.
type Prototypes = BTreeMap<String, String>;

/// Writes one page for each function of the header to a folder.
///
/// # Errors
/// A function of the header is not described, a described function does not exist, or a file
/// cannot be read or written.
pub fn write_pages(project_folder: &Path, folder: &Path) -> Result<()> {
    let read = |path: &str| {
        fs::read_to_string(project_folder.join(path)).with_context(|| path.to_string())
    };
    let prototypes = parse_header(&read("libpvm/capi/include/pvm3.h")?);
    let entries = parse_reference(&read("docs/reference/c-interface.md")?)?;
    let described: Vec<&String> = entries.iter().flat_map(|entry| &entry.names).collect();
    for name in prototypes.keys() {
        if !described.contains(&name) {
            bail!("docs/reference/c-interface.md does not describe {name}");
        }
    }
    fs::create_dir_all(folder)?;
    for (index, entry) in entries.iter().enumerate() {
        let related: Vec<&str> = entries
            .iter()
            .enumerate()
            .filter(|(other, _)| *other != index)
            .filter(|(_, other)| other.subject == entry.subject)
            .map(|(_, other)| other.names[0].as_str())
            .collect();
        let page = page_text(entry, &prototypes, &related)?;
        let main_name = &entry.names[0];
        fs::write(folder.join(format!("{main_name}.3")), page)?;
        for name in &entry.names[1..] {
            let link = format!(".so man3/{main_name}.3\n");
            fs::write(folder.join(format!("{name}.3")), link)?;
        }
    }
    Ok(())
}

/// Returns the prototypes of a header by function name.
fn parse_header(text: &str) -> Prototypes {
    let mut prototypes = Prototypes::new();
    let declarations = text
        .split_once("extern \"C\" {")
        .map_or(text, |(_, after)| after);
    let without_comments: String = declarations
        .lines()
        .filter(|line| !line.starts_with("/*") && !line.starts_with('#'))
        .map(|line| format!("{} ", line.trim()))
        .collect();
    for declaration in without_comments.split(';') {
        let declaration = declaration.trim();
        let name = declaration
            .split(['(', ' ', '*', ')'])
            .find(|word| word.starts_with("pvm") || word.starts_with("Pvm"));
        if let Some(name) = name.filter(|_| declaration.contains('(')) {
            prototypes.insert(name.to_string(), declaration.to_string());
        }
    }
    prototypes
}

fn parse_reference(text: &str) -> Result<Vec<Entry>> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut subject = String::new();
    for part in text.split("\n#") {
        let (title, body) = part.split_once('\n').unwrap_or((part, ""));
        if let Some(title) = title.strip_prefix("# ") {
            subject = title.to_string();
            continue;
        }
        let Some(title) = title.strip_prefix("## ") else {
            continue;
        };
        let names = title
            .split(", ")
            .map(|name| name.trim_matches('`').to_string())
            .collect();
        let (description, errors) = body.split_once("\nErrors: ").unwrap_or((body, ""));
        entries.push(Entry {
            subject: subject.clone(),
            names,
            description: one_line(description),
            errors: parse_errors(&one_line(errors)).with_context(|| title.to_string())?,
        });
    }
    Ok(entries)
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Parses "`CODE` condition; `CODE` condition; text.".
fn parse_errors(text: &str) -> Result<Vec<(String, String)>> {
    let text = text.trim_end_matches('.');
    let mut errors = Vec::new();
    for part in text.split("; ").filter(|part| !part.is_empty()) {
        match part.strip_prefix('`').and_then(|part| part.split_once('`')) {
            Some((code, condition)) => {
                errors.push((code.to_string(), condition.trim().to_string()));
            }
            None => errors.push((String::new(), part.to_string())),
        }
    }
    if errors.iter().any(|(_, condition)| condition.is_empty()) {
        bail!("an error has no condition");
    }
    Ok(errors)
}

fn page_text(entry: &Entry, prototypes: &Prototypes, related: &[&str]) -> Result<String> {
    let main_name = &entry.names[0];
    let summary = entry
        .description
        .split_once(". ")
        .map_or(entry.description.as_str(), |(first, _)| first)
        .trim_end_matches('.');
    let mut page = format!(
        ".Dd {PAGE_DATE}\n.Dt {} 3\n.Os Sempa\n.Sh NAME\n",
        main_name.to_uppercase()
    );
    for (index, name) in entry.names.iter().enumerate() {
        let separator = if index + 1 < entry.names.len() {
            " ,"
        } else {
            ""
        };
        page += &format!(".Nm {name}{separator}\n");
    }
    page += &format!(".Nd {}\n", plain(&lower_first(summary)));
    page += ".Sh SYNOPSIS\n.In pvm3.h\n";
    for name in &entry.names {
        let prototype = prototypes
            .get(name)
            .with_context(|| format!("{name} is described and not declared in pvm3.h"))?;
        page += &synopsis(name, prototype);
    }
    page += &format!(".Sh DESCRIPTION\n{}", paragraphs(&entry.description));
    if entry.subject == "Groups" {
        page += ".Pp\nLink with\n.Fl lgpvm3 lpvm3 .\n";
    }
    if !entry.errors.is_empty() {
        page += ".Sh ERRORS\n";
        page += &format!(
            "A negative value is returned, and stored in\n.Va pvm_errno .\n.Bl -tag -width \
             PvmParentNotSet\n{}.El\n",
            error_items(&entry.errors)
        );
    }
    page += ".Sh SEE ALSO\n.Xr pvm 1";
    let mut sorted = related.to_vec();
    sorted.sort_unstable_by_key(|name| name.to_lowercase());
    for name in sorted {
        page += &format!(" ,\n.Xr {name} 3");
    }
    page += "\n";
    Ok(page)
}

fn error_items(errors: &[(String, String)]) -> String {
    let item = |(code, condition): &(String, String)| {
        if code.is_empty() {
            format!(".It other\n{}\n", escaped(condition))
        } else {
            format!(".It Dv {code}\n{}.\n", escaped(&upper_first(condition)))
        }
    };
    errors.iter().map(item).collect()
}

/// Returns the synopsis of a function. Functions with an argument or a result that is a function
/// have their prototype as text.
fn synopsis(name: &str, prototype: &str) -> String {
    let (before, after) = prototype.split_once(name).unwrap_or((prototype, ""));
    let arguments = after
        .trim()
        .strip_prefix('(')
        .map(|rest| rest.trim_end_matches(')'));
    match arguments {
        Some(arguments) if !arguments.contains('(') && !before.contains('(') => {
            let mut text = format!(".Ft \"{}\"\n.Fo {name}\n", before.trim());
            for argument in arguments.split(", ") {
                text += &format!(".Fa \"{argument}\"\n");
            }
            text + ".Fc\n"
        }
        _ => format!(".Bd -literal\n{prototype};\n.Ed\n"),
    }
}

/// Returns the sentences of a description, each in a line, as `mdoc` expects them.
fn paragraphs(text: &str) -> String {
    text.split(". ")
        .map(|sentence| {
            let sentence = sentence.trim_end_matches('.');
            format!("{}.\n", escaped(&upper_first(sentence)))
        })
        .collect()
}

/// Escapes a text for a line of its own.
fn escaped(text: &str) -> String {
    let text = plain(text);
    if text.starts_with(['.', '\'']) {
        format!("\\&{text}")
    } else {
        text
    }
}

/// Removes the marks of code and escapes characters.
fn plain(text: &str) -> String {
    text.replace('\\', "\\e")
        .replace('`', "")
        .replace('−', "\\-")
}

fn lower_first(text: &str) -> String {
    change_first(text, |first| first.to_lowercase().to_string())
}

fn upper_first(text: &str) -> String {
    // A name of the interface keeps its letters.
    if text.starts_with('`') {
        return text.to_string();
    }
    change_first(text, |first| first.to_uppercase().to_string())
}

fn change_first(text: &str, change: impl Fn(char) -> String) -> String {
    let mut characters = text.chars();
    match characters.next() {
        Some(first) => change(first) + characters.as_str(),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prototypes_are_found_by_name() {
        let header = "extern \"C\" {\n#endif\n/* ---- A ---- */\nint pvm_a(int x,\n   char *y);\n\
                      char *pvmb(void);\nint (*pvm_c(int (*f)(int m)))(int m);\nextern int pvm_errno;\n";
        let prototypes = parse_header(header);
        assert_eq!(
            prototypes.keys().collect::<Vec<_>>(),
            ["pvm_a", "pvm_c", "pvmb"]
        );
        assert_eq!(prototypes["pvm_a"], "int pvm_a(int x, char *y)");
    }

    #[test]
    fn page_has_synopsis_description_and_errors() {
        let reference = "# C\n\n## Hosts\n\n### `pvm_a`, `pvm_b`\nDoes it. Returns −1.\nErrors: \
                         `PvmNoHost` (in `x`) no host; and those of `pvm_b`.\n";
        let entries = parse_reference(reference).expect("a reference");
        let prototypes = parse_header("int pvm_a(int x); int pvm_b(void);");
        let page = page_text(&entries[0], &prototypes, &["pvm_z"]).expect("a page");
        for part in [
            ".Nm pvm_a ,\n.Nm pvm_b\n.Nd does it\n",
            ".Ft \"int\"\n.Fo pvm_a\n.Fa \"int x\"\n.Fc\n",
            "Does it.\nReturns \\-1.\n",
            ".It Dv PvmNoHost\n(in x) no host.\n",
            ".It other\nand those of pvm_b\n",
            ".Xr pvm 1 ,\n.Xr pvm_z 3\n",
        ] {
            assert!(page.contains(part), "{part}\nin\n{page}");
        }
    }

    #[test]
    fn error_without_condition_is_refused() {
        assert!(parse_errors("`PvmNoHost`").is_err());
    }
}
