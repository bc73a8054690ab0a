//! From an example's texts to tokens: what goes into the cache, what is asked, what is scored.
//!
//! The rule for tokens at the border of context and answer is lm-evaluation-harness's: white space at the context's end
//! belongs to the answer; context and answer are encoded together, and the answer's tokens are those after as many as the context
//! alone has. Where the context's own tokens are not the beginning of the whole's, the two meet inside a token of the
//! whole: the context's own tokens are kept and the item is counted.
//!
//! ```text
//! context  "Question: why? Answer:"   answer  " because"
//! cache    Question : why ? Answer            (compressed)
//! query                             :         (read after the compression; predicts the first answer token)
//! target                              because (scored)
//! ```

use super::{AnswerOption, Example};

/// An example in tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    /// Tokens that the cache holds when it is compressed.
    pub context: Vec<u32>,
    /// `[question][option]`.
    pub branches: Vec<Vec<Branch>>,
    /// Options whose border lies inside a token of the whole.
    pub n_split_borders: usize,
}

/// One way on from the context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Branch {
    /// Tokens read first, not scored; at least one: it predicts the target's first.
    pub query: Vec<u32>,
    /// Tokens scored; at least one.
    pub target: Vec<u32>,
    /// Characters that normalise the likelihood.
    pub n_chars: usize,
}

/// Encodes an example; `prefix` stands before everything (BOS, or nothing). `None` where an answer has no tokens of its
/// own or nothing stands before it.
///
/// # Errors
/// What `encode` gives.
pub fn prompt<E>(
    example: &Example,
    prefix: &[u32],
    encode: impl Fn(&str) -> Result<Vec<u32>, E>,
) -> Result<Option<Prompt>, E> {
    let mut n_split_borders = 0;
    let mut pair = |option: &AnswerOption| -> Result<(Vec<u32>, Vec<u32>, usize), E> {
        let before = option.before.trim_end();
        let whole = format!("{}{}", option.before, option.target);
        let (mut own, whole) = (encode(before)?, encode(&whole)?);
        if !whole.starts_with(&own) {
            n_split_borders += 1;
        }
        let target = whole.get(own.len()..).unwrap_or_default().to_vec();
        own.splice(0..0, prefix.iter().copied());
        Ok((own, target, option.n_chars))
    };
    let mut options = Vec::new();
    for question in &example.questions {
        let pairs = question.options.iter().map(&mut pair);
        options.push(pairs.collect::<Result<Vec<_>, E>>()?);
    }
    let mut context = [prefix, &encode(&example.context)?].concat();
    for (own, target, _) in options.iter().flatten() {
        if own.is_empty() || target.is_empty() {
            return Ok(None);
        }
        let common = context.iter().zip(own).take_while(|(a, b)| a == b).count();
        context.truncate(common.min(own.len() - 1));
    }
    if context.is_empty() {
        return Ok(None);
    }
    let branch = |(own, target, n_chars): (Vec<u32>, Vec<u32>, usize)| Branch {
        query: own[context.len()..].to_vec(),
        target,
        n_chars,
    };
    let branches = options
        .into_iter()
        .map(|o| o.into_iter().map(branch).collect())
        .collect();
    Ok(Some(Prompt {
        branches,
        n_split_borders,
        context,
    }))
}
