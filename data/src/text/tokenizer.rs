//! A folder's `tokenizer.json`.

use std::{collections::BTreeSet, ops::Range, path::Path};

use drivetrain_core::{Error, ErrorKind, Result, files::read_text};
use tokenizers::Tokenizer;

/// Largest `tokenizer.json`.
const MAX_TOKENIZER_BYTES: u64 = 1 << 30;

/// Ids, and the bytes of the text that each stands for (empty for a token that the post-processor added).
#[derive(Debug)]
pub(super) struct Encoded {
    pub(super) ids: Vec<u32>,
    pub(super) spans: Vec<Range<usize>>,
}

/// A tokenizer that neither cuts nor pads.
#[derive(Debug)]
pub(super) struct TextTokenizer {
    tokenizer: Tokenizer,
    special: BTreeSet<u32>,
}

impl TextTokenizer {
    /// Reads `tokenizer.json`.
    pub(super) fn open(folder: &Path) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        let failed = |message: &str| {
            Error::new(ErrorKind::File, "read_tokenizer", message).with("file", path.display())
        };
        let text = read_text(&path, MAX_TOKENIZER_BYTES).map_err(|cause| {
            failed("cannot read the tokenizer").caused_by(cause).help(
                "lines of text need the model folder's tokenizer.json (a model with only a \
                 tokenizer.model must be converted first); lines of tokens need none",
            )
        })?;
        let mut tokenizer = Tokenizer::from_bytes(text).map_err(|cause| {
            failed("the file is not a tokenizer that can be read").caused_by(cause)
        })?;
        // The file may say to cut or pad; here the limit is the job's, and nothing is padded.
        tokenizer
            .with_truncation(None)
            .map_err(|cause| failed("cannot use the tokenizer").caused_by(cause))?
            .with_padding(None);
        let added = tokenizer.get_added_tokens_decoder();
        let special = added
            .iter()
            .filter(|(_, token)| token.special)
            .map(|(&id, _)| id)
            .collect();
        Ok(Self { tokenizer, special })
    }

    /// Tokenizes; `with_special` has the post-processor add its tokens, such as bos.
    pub(super) fn encode(&self, text: &str, with_special: bool) -> Result<Encoded> {
        let encoding = self.tokenizer.encode(text, with_special).map_err(|cause| {
            Error::new(
                ErrorKind::Data,
                "tokenize",
                "the tokenizer refuses the text",
            )
            .caused_by(cause)
        })?;
        let added = encoding.get_special_tokens_mask();
        let spans = encoding.get_offsets().iter().zip(added);
        Ok(Encoded {
            ids: encoding.get_ids().to_vec(),
            spans: spans
                .map(|(&(start, end), &added)| if added == 1 { 0..0 } else { start..end })
                .collect(),
        })
    }

    /// The id of a token by its text.
    pub(super) fn id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// Whether the tokenizer declares the token special.
    pub(super) fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }
}
