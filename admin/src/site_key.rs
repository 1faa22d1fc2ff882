//! `site-key`: creates, shows and replaces the key that seals the images of tasks.

use crate::outcome::{Outcome, refuse_unless_root};
use anyhow::Result;
use checkpoint::seal::{KeyId, SiteKeys, site_key_path};
use clap::Subcommand;
use serde_json::json;
use std::path::Path;

#[derive(Debug, Subcommand)]
pub(crate) enum SiteKeyCommand {
    /// Create the site key, on one host of the site
    Create,
    /// Show the identifier of the site key, which does not reveal the key
    Show {
        /// Print one JSON value
        #[arg(long)]
        json: bool,
    },
    /// Replace the site key; what the old key has sealed still opens
    Rotate,
    /// Remove the old keys; what they have sealed is lost
    ForgetPrevious,
}

pub(crate) fn run(command: &SiteKeyCommand) -> Result<Outcome> {
    if let Some(refusal) = refuse_unless_root("site-key", "only root may read the site key") {
        return Ok(refusal);
    }
    let path = site_key_path();
    match command {
        SiteKeyCommand::Create => print!("{}", creation_text(&path, SiteKeys::create_file(&path)?)),
        SiteKeyCommand::Show { json } => show(&path, *json)?,
        SiteKeyCommand::Rotate => print!("{}", rotation_text(&path, SiteKeys::rotate_file(&path)?)),
        SiteKeyCommand::ForgetPrevious => {
            let id = SiteKeys::forget_previous_file(&path)?;
            println!(
                "{} has only the key {id} now; copy the file to all other hosts of the site",
                path.display()
            );
        }
    }
    Ok(Outcome::Done)
}

fn show(path: &Path, is_json: bool) -> Result<()> {
    let keys = SiteKeys::load(path)?;
    let id = keys.current_id().to_string();
    let previous_ids: Vec<String> = keys.previous_ids().map(|id| id.to_string()).collect();
    if is_json {
        println!(
            "{}",
            json!({ "path": path, "key_id": id, "previous_key_ids": previous_ids })
        );
        return Ok(());
    }
    println!("{}: key {id}", path.display());
    if !previous_ids.is_empty() {
        println!("previous keys: {}", previous_ids.join(", "));
    }
    Ok(())
}

/// Returns the command that copies the key file to another host. The file is never readable by
/// other users there.
fn copy_command(path: &Path) -> String {
    let (file, dir) = (
        path.display(),
        path.parent().unwrap_or(Path::new("/")).display(),
    );
    format!("  ssh root@HOST 'umask 077; mkdir -p -m 755 {dir}; cat > {file}' < {file}\n")
}

fn creation_text(path: &Path, id: KeyId) -> String {
    format!(
        "created the site key {} with the identifier {id}\n\
         All hosts of the site need the same file, readable by root only. Copy it to each host:\n{}\
         'pvm-admin doctor HOST ...' then compares the identifiers. Who has the file can run programs as \
         any user of the site.\n",
        path.display(),
        copy_command(path)
    )
}

fn rotation_text(path: &Path, id: KeyId) -> String {
    format!(
        "{} has the new key {id}; what the previous keys have sealed still opens here\n\
         1. Copy the file to all other hosts of the site now; do not rotate there:\n{}\
         2. Taskers read the key when they start. Until both hosts of a migration have the new key, \
         the migration is refused, and the task stays where it is.\n\
         3. When all taskers were started again, and no checkpoint of the old key is needed any more, \
         run 'pvm-admin site-key forget-previous' here, and copy the file again.\n",
        path.display(),
        copy_command(path)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The texts name the file and the identifier, and never the key.
    #[test]
    fn texts_reveal_no_key() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("site.key");
        let id = SiteKeys::create_file(&path).expect("created");
        let file_text = std::fs::read_to_string(&path).expect("a file");
        let key_line = file_text.lines().find(|line| line.starts_with("current "));
        let digits = key_line.expect("a key").trim_start_matches("current ");
        for text in [creation_text(&path, id), rotation_text(&path, id)] {
            assert!(
                text.contains(&id.to_string()) && text.contains("cat > "),
                "{text}"
            );
            assert!(!text.contains(&digits[..16]), "{text}");
        }
    }
}
